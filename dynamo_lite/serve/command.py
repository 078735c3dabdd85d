"""`dynamo-lite serve`: runs a resolved configuration and returns an exit code."""

import asyncio
import itertools
import logging.config
import os
import secrets
import time
from contextlib import AsyncExitStack
from pathlib import Path

from dynamo_lite.protocol.errors import ConfigError, StartupError
from dynamo_lite.protocol.permissions import OPERATOR
from dynamo_lite.runtime.address import is_loopback, redact
from dynamo_lite.runtime.process.logs import logging_config
from dynamo_lite.runtime.process.stop import Interrupted, StopRequest, stop_on_signals
from dynamo_lite.serve import startup_checks
from dynamo_lite.serve.certificate_folder import make_certificates
from dynamo_lite.serve.config import GraphConfig
from dynamo_lite.serve.embedded import (
    EmbeddedEtcd,
    EmbeddedNats,
    EmbeddedServer,
    fresh_folder,
)
from dynamo_lite.serve.launches import ServeRequest
from dynamo_lite.serve.progress import Progress
from dynamo_lite.serve.run_state import (
    RunState,
    lock,
    read_run,
    run_file,
    running_certificates,
)
from dynamo_lite.serve.supervisor import Supervisor
from dynamo_lite.serve.supervisor_socket import SupervisorSocket
from dynamo_lite.vllm.compat import tested_range, vllm_version


async def serve(request: ServeRequest) -> int:
    """Runs until stopped.

    Raises ConfigError, StartupError, and Interrupted when it is stopped before any process
    of the graph was started. No process is left running then.
    """
    stop, force = StopRequest(), asyncio.Event()
    progress = Progress()
    here = request.config.here
    if any(service.service.flags != "none" for service in here):
        progress.line("serve", f"{vllm_version()}; tried are {tested_range()}")
    async with AsyncExitStack() as stack:
        stack.enter_context(stop_on_signals(stop, again=force.set))
        started = [stack.enter_context(startup_checks.held_port(service)) for service in here]
        directory = _lock_directory(request, stack)
        async with stop.interrupts():
            state, servers = await _connect(request, stack, progress)
        if stop.is_set:
            raise Interrupted
        stack.callback(run_file(directory).unlink, missing_ok=True)
        supervisor = Supervisor(request, started, servers, directory, state, stop, force, progress)
        await stack.enter_async_context(SupervisorSocket(directory, supervisor))
        code = await supervisor.run()
    progress.line("serve", "ended")
    return code


def _certificates(request: ServeRequest, nats_url: str | None, etcd_url: str | None) -> Path | None:
    """The folder of this graph's certificates; None: it has none.

    nats_url, etcd_url: None for an embedded server. A graph with one is on this host only.

    Raises ConfigError where there is none, or a file cannot be used, StartupError when none can be
    made.
    """
    shared, here = request.config.shared, request.config.here
    folder = shared.certificate_folder
    if folder is None:
        if request.config.only is not None:
            folder = running_certificates(read_run(request.state_dir), shared.namespace)
        elif not is_loopback(shared.bind_host) and (nats_url is None or etcd_url is None):
            folder = request.state_dir.absolute() / "certificates" / shared.namespace
        if folder is not None:
            every = [service.service.name for service in here]
            make_certificates(folder, shared.namespace, [*every, OPERATOR])
    names = [service.service.name for service in here if service.workers]
    startup_checks.check_certificates(folder, shared.namespace, names, shared.bind_host)
    return folder


def check_quickly(config: GraphConfig, state_dir: Path) -> None:
    """What takes no time, before vLLM is asked about its arguments, which takes many seconds.

    config: without mistakes so far. Raises ConfigError, StartupError.
    """
    # The graph that runs here has the ports, too.
    if config.only is None and (state_dir / "lock").exists():
        with lock(state_dir) as free:
            if not free:
                raise _in_use(state_dir)
    for service in config.here:
        with startup_checks.held_port(service):
            pass
        if service.service.flags != "none":
            startup_checks.check_model(service)


def _lock_directory(request: ServeRequest, stack: AsyncExitStack) -> Path:
    """Locks the state directory, or for a lone service a subdirectory of it."""
    only = request.config.only
    if only is None:
        if not stack.enter_context(lock(request.state_dir)):
            raise _in_use(request.state_dir)
        return request.state_dir
    folders = (request.state_dir / "lone" / f"{only}-{number}" for number in itertools.count())
    return next(folder for folder in folders if stack.enter_context(lock(folder)))


def _in_use(state_dir: Path) -> StartupError:
    holder = read_run(state_dir)
    who = f" (pid {holder.pid}, {holder.http or holder.graph})" if holder else ""
    message = f"a graph runs on state directory {state_dir}{who}"
    return StartupError(f"{message}; stop it or use --state-dir")


async def _connect(
    request: ServeRequest, stack: AsyncExitStack, progress: Progress
) -> tuple[RunState, list[EmbeddedServer]]:
    """Finds or starts NATS and etcd, and finds or makes the certificates. Returns also the embedded
    servers that were started.

    Raises ConfigError, StartupError.
    """
    nats_url, etcd_url = request.nats_url, request.etcd_url
    if request.config.only is not None and (nats_url is None or etcd_url is None):
        running = read_run(request.state_dir)
        if running is None:
            message = "--service-name needs --nats-url and --etcd-url"
            raise ConfigError([f"{message}, because no graph runs on {request.state_dir}"])
        nats_url, etcd_url = nats_url or running.nats, etcd_url or running.etcd
    servers: list[EmbeddedServer] = []
    folder = _certificates(request, nats_url, etcd_url)
    namespace = request.config.shared.namespace
    if nats_url is None:
        folder_of_nats = fresh_folder(request.state_dir, "nats")
        embedded = EmbeddedNats(folder_of_nats, token=secrets.token_hex(16))
        servers.append(await stack.enter_async_context(embedded))
        nats_url = embedded.url
    if etcd_url is None:
        etcd = EmbeddedEtcd(fresh_folder(request.state_dir, "etcd"), private=True)
        servers.append(await stack.enter_async_context(etcd))
        etcd_url = etcd.url
        etcdctl = request.state_dir / "etcdctl"
        try:
            etcd.write_etcdctl(etcdctl)
        except OSError as exc:
            raise StartupError(f"{etcdctl}: cannot be written: {exc.strerror}") from exc
        stack.callback(etcdctl.unlink, missing_ok=True)
        progress.line("serve", f"to look into etcd: {etcdctl} get --prefix {namespace}")
    progress.line("serve", f"NATS {redact(nats_url)}, etcd {redact(etcd_url)}")
    state = RunState(
        pid=os.getpid(),
        started_at=time.time(),
        graph=request.graph_name,
        namespace=namespace,
        nats=nats_url,
        etcd=etcd_url,
        certificates="" if folder is None else str(folder),
    )
    return state, servers


def run(request: ServeRequest) -> int:
    """Runs `serve`. Raises what it raises, with KeyboardInterrupt in place of Interrupted."""
    logging.config.dictConfig(logging_config(request.log_format, "serve", 0, level="WARNING"))
    startup_checks.make_demo_model(request.config.here)
    try:
        return asyncio.run(serve(request))
    except Interrupted:
        raise KeyboardInterrupt from None
