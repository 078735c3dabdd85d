"""`dynamo-lite serve`: runs a resolved configuration and returns an exit code."""

import asyncio
import itertools
import logging.config
import os
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

from dynamo_lite.protocol.errors import ConfigError, StartupError
from dynamo_lite.protocol.permissions import OPERATOR
from dynamo_lite.runtime.address import is_loopback, redact
from dynamo_lite.runtime.certificates import Certificates
from dynamo_lite.runtime.process.logs import logging_config
from dynamo_lite.runtime.process.stop import Interrupted, StopRequest, stop_on_signals
from dynamo_lite.serve import startup_checks
from dynamo_lite.serve.certificate_folder import make_certificates
from dynamo_lite.serve.config import GraphConfig, ServiceConfig
from dynamo_lite.serve.document import Document
from dynamo_lite.serve.embedded import EmbeddedEtcd, EmbeddedNats, EmbeddedServer, fresh_folder
from dynamo_lite.serve.launches import ServeRequest
from dynamo_lite.serve.progress import Progress
from dynamo_lite.serve.run_state import RunState, lock, read_run, run_file, running_certificates
from dynamo_lite.serve.supervisor import Supervisor
from dynamo_lite.serve.supervisor_socket import supervisor_socket
from dynamo_lite.vllm.compat import tested_range, vllm_version


def run(request: ServeRequest, document: Document, *, allow_untested: bool = False) -> int:
    """Checks the configuration, and runs it until stopped. Returns the exit code.

    Raises ConfigError and StartupError, and KeyboardInterrupt when it is stopped before any process
    of the graph was started. No process is left running then.
    """
    with ExitStack() as stack:
        # What takes no time comes before vLLM, which takes many seconds.
        held = None if document.mistakes else hold(request.config, request.state_dir, stack)
        check_arguments(request.config, document, allow_untested=allow_untested)
        assert held is not None
        logging.config.dictConfig(logging_config(request.log_format, "serve", 0, level="WARNING"))
        startup_checks.make_demo_model(request.config.here)
        try:
            return asyncio.run(_serve(request, *held))
        except Interrupted:
            raise KeyboardInterrupt from None


def check_arguments(config: GraphConfig, document: Document, *, allow_untested: bool) -> None:
    """Asks vLLM. Raises ConfigError with all mistakes of the document, and StartupError."""
    startup_checks.check_vllm_arguments(config, document, allow_untested=allow_untested)
    if not document.mistakes:
        startup_checks.check_edge(config, document)
    document.raise_mistakes()


async def _serve(request: ServeRequest, directory: Path, services: Sequence[ServiceConfig]) -> int:
    """directory, services: what `hold` has returned."""
    stop, force = StopRequest(), asyncio.Event()
    progress = Progress()
    if any(service.service.flags != "none" for service in services):
        progress.line("serve", f"{vllm_version()}; tried are {tested_range()}")
    async with AsyncExitStack() as stack:
        stack.enter_context(stop_on_signals(stop, again=force.set))
        async with stop.interrupts():
            state, servers = await _connect(request, stack, progress)
        if stop.is_set:
            raise Interrupted
        stack.callback(run_file(directory).unlink, missing_ok=True)
        supervisor = Supervisor(request, services, servers, directory, state, stop, force, progress)
        await stack.enter_async_context(supervisor_socket(directory, supervisor))
        code = await supervisor.run()
    progress.line("serve", "ended")
    return code


def hold(
    config: GraphConfig, state_dir: Path, stack: ExitStack
) -> tuple[Path, list[ServiceConfig]]:
    """Locks the state directory, or for a lone service a subdirectory of it, and takes ports, until
    the stack is closed. Returns the directory, and the services to start with their real ports.

    Raises StartupError when another process has them, or a model is missing.
    """
    if config.only is None:
        directory = state_dir
        if not lock(directory, stack):
            holder = read_run(directory)
            who = f" (pid {holder.pid}, {holder.http or holder.graph})" if holder else ""
            message = f"a graph runs on state directory {directory}{who}"
            raise StartupError(f"{message}; stop it or use --state-dir")
    else:
        folders = (state_dir / "lone" / f"{config.only}-{n}" for n in itertools.count())
        directory = next(folder for folder in folders if lock(folder, stack))
    services = [startup_checks.hold_port(one, stack) for one in config.here]
    for service in services:
        startup_checks.check_model(service)
    return directory, services


def _certificates(
    request: ServeRequest, running: RunState | None, *, embedded: bool
) -> Path | None:
    """The folder of this graph's certificates; None: it has none.

    running: the graph that a lone service joins. embedded: whether the graph has an embedded server
    and so is on this host only. Raises ConfigError where there is none, or a file cannot be used.
    """
    shared, here = request.config.shared, request.config.here
    folder = shared.certificate_folder
    if folder is None:
        folder = running_certificates(running, shared.namespace)
        if embedded and not is_loopback(shared.bind_host):
            folder = request.state_dir.absolute() / "certificates" / shared.namespace
        if folder is not None:
            every = [service.service.name for service in here]
            make_certificates(folder, shared.namespace, [*every, OPERATOR])
    if folder is None:
        named = "Graph.bind-host", "Graph.certificates"
        startup_checks.check_bind_host(shared.bind_host, shared.namespace, *named)
    else:
        for service in here:
            if service.workers:
                Certificates(folder, shared.namespace, service.service.name)
    return folder


async def _connect(
    request: ServeRequest, stack: AsyncExitStack, progress: Progress
) -> tuple[RunState, list[EmbeddedServer]]:
    """Finds or starts NATS and etcd, and finds or makes the certificates. Returns also the embedded
    servers that were started.

    Raises ConfigError, StartupError.
    """
    nats_url, etcd_url, only = request.nats_url, request.etcd_url, request.config.only
    namespace = request.config.shared.namespace
    running = None if only is None else read_run(request.state_dir)
    if running is not None:
        nats_url, etcd_url = nats_url or running.nats, etcd_url or running.etcd
    elif only is not None and (nats_url is None or etcd_url is None):
        message = "--service-name needs --nats-url and --etcd-url"
        raise ConfigError([f"{message}, because no graph runs on {request.state_dir}"])
    folder = _certificates(request, running, embedded=nats_url is None or etcd_url is None)
    servers: list[EmbeddedServer] = []
    if nats_url is None:
        nats = EmbeddedNats(fresh_folder(request.state_dir, "nats"), private=True)
        servers.append(await stack.enter_async_context(nats))
        nats_url = nats.url
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
