"""`dynamo-lite serve`: runs a resolved configuration and returns an exit code."""

import asyncio
import logging.config
import os
import secrets
import signal
import time
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

from dynamo_lite.protocol.errors import ConfigError, StartupError
from dynamo_lite.runtime.address import redact
from dynamo_lite.runtime.process.logs import logging_config
from dynamo_lite.runtime.process.stop import Interrupted, StopRequest, stop_on_signals
from dynamo_lite.serve import startup_checks
from dynamo_lite.serve.access import ServersToCheck
from dynamo_lite.serve.config import GraphConfig, ServiceConfig
from dynamo_lite.serve.embedded import (
    EmbeddedEtcd,
    EmbeddedNats,
    EmbeddedServer,
    check_folders,
    empty_folders,
    folder_of,
)
from dynamo_lite.serve.launches import Launches, ServeRequest, fork_workers
from dynamo_lite.serve.progress import Progress
from dynamo_lite.serve.run_state import RunFile, RunState, lock, read_run
from dynamo_lite.serve.secret_file import (
    check_exposure,
    given_secret,
    made_secret,
    running_secret,
)
from dynamo_lite.serve.supervisor import Supervisor
from dynamo_lite.serve.supervisor_socket import SupervisorSocket

_MAX_LONE_SERVICES = 1000
#: The first one begins a drain, the second one kills all processes.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


async def serve(request: ServeRequest) -> int:
    """Runs until stopped.

    Raises ConfigError, StartupError, and Interrupted when it is stopped before any process
    of the graph was started. No process is left running then.
    """
    stop, force = StopRequest(), asyncio.Event()
    progress = Progress()
    started = _services_here(request.config, request.only)
    for service in started:
        if service.service.flags != "none":
            startup_checks.check_tls(service)
    async with AsyncExitStack() as stack:
        stack.enter_context(stop_on_signals(stop, _SIGNALS, again=force.set))
        started = [stack.enter_context(startup_checks.shared_port(service)) for service in started]
        directory = _lock_directory(request, stack)
        async with stop.interrupts():
            state, servers = await _connect(request, directory, stack, progress)
        if stop.is_set:
            raise Interrupted
        run = RunFile(directory / "run.json", state)
        stack.callback(run.remove)
        tiers = [Launches(request, service, directory, state) for service in started]
        fork_workers(tiers)
        shared = request.config.shared
        supervisor = Supervisor(tiers, servers, run, stop, force, progress, shared)
        await stack.enter_async_context(SupervisorSocket(directory, supervisor))
        code = await supervisor.run()
    progress.line("serve", "ended")
    return code


def _secret(request: ServeRequest, directory: Path, nats_url: str | None) -> Path | None:
    """The secret file of this graph; None: its messages are not authenticated.

    nats_url: None for an embedded server.

    Raises StartupError for a file that cannot be used, ConfigError where one is missing.
    """
    if request.secret_file is not None:
        secret = given_secret(request.secret_file)
    elif nats_url is None:
        secret = made_secret(directory, keep=request.etcd_url is not None)
    else:
        running = read_run(request.state_dir) if request.only is not None else None
        secret = running_secret(running, nats_url)
    check_exposure(request.config.shared.bind_host, nats_url, secret)
    return secret


def check_quickly(config: GraphConfig, state_dir: Path, only: str | None) -> None:
    """What takes no time, before vLLM is asked about its arguments, which takes many seconds.

    config: without mistakes so far. only: the service that is started alone. Raises ConfigError,
    StartupError.
    """
    # The graph that runs here has the ports, too.
    if only is None and (state_dir / "lock").exists():
        with ExitStack() as stack:
            _lock_for_graph(state_dir, stack)
    startup_checks.check_bind_host(config.shared)
    startup_checks.check_status_tls(config.shared)
    for service in _services_here(config, only):
        startup_checks.check_port(service)
        startup_checks.check_service_account(service)
        if service.service.flags != "none":
            startup_checks.check_model(service)


def _services_here(config: GraphConfig, only: str | None) -> list[ServiceConfig]:
    """The services that this command starts processes for, in drain order."""
    outer = [c for c in config.services if c.service.component]
    return [c for c in outer if only in (None, c.service.name)]


def _lock_directory(request: ServeRequest, stack: AsyncExitStack) -> Path:
    """Locks the state directory, or for a lone service a subdirectory of it."""
    if request.only is None:
        _lock_for_graph(request.state_dir, stack)
        return request.state_dir
    for number in range(_MAX_LONE_SERVICES):
        directory = request.state_dir / "lone" / f"{request.only}-{number}"
        if stack.enter_context(lock(directory)):
            return directory
    where = f"{request.state_dir}; use another --state-dir"
    raise StartupError(f"more than {_MAX_LONE_SERVICES} lone services in {where}")


def _lock_for_graph(state_dir: Path, stack: ExitStack | AsyncExitStack) -> None:
    if not stack.enter_context(lock(state_dir)):
        holder = read_run(state_dir)
        who = f" (pid {holder.pid}, {holder.http or holder.graph})" if holder else ""
        message = f"a graph runs on state directory {state_dir}{who}"
        raise StartupError(f"{message}; stop it or use --state-dir")


async def _connect(
    request: ServeRequest, directory: Path, stack: AsyncExitStack, progress: Progress
) -> tuple[RunState, list[EmbeddedServer]]:
    """Finds or starts NATS and etcd, and finds or makes the secret. Returns also the embedded
    servers that were started.

    Raises ConfigError, StartupError.
    """
    nats_url, etcd_url = request.nats_url, request.etcd_url
    if request.only is not None and (nats_url is None or etcd_url is None):
        running = read_run(request.state_dir)
        if running is None:
            message = "--service-name needs --nats-url and --etcd-url"
            raise ConfigError([f"{message}, because no graph runs on {request.state_dir}"])
        nats_url, etcd_url = nats_url or running.nats, etcd_url or running.etcd
    nats_folder, etcd_folder = (folder_of(request.state_dir, name) for name in ("nats", "etcd"))
    pairs = ((nats_folder, nats_url), (etcd_folder, etcd_url))
    folders = [folder for folder, url in pairs if url is None]
    # Nothing is written where a folder turns out to be somebody else's.
    check_folders(folders)
    servers: list[EmbeddedServer] = []
    secret = _secret(request, directory, nats_url)
    namespace = request.config.shared.namespace
    await startup_checks.check_servers(
        ServersToCheck(
            nats=nats_url,
            etcd=etcd_url,
            namespace=namespace,
            authenticated=secret is not None,
            queue=startup_checks.queue_options(_services_here(request.config, request.only)),
        )
    )
    for warning in startup_checks.readable_by_others(nats_url, etcd_url):
        progress.line("serve", warning)
    empty_folders(folders)
    if nats_url is None:
        embedded = EmbeddedNats(nats_folder, token=secrets.token_hex(16))
        nats = await stack.enter_async_context(embedded)
        nats_url = nats.url
        servers.append(nats)
    if etcd_url is None:
        etcd = await stack.enter_async_context(EmbeddedEtcd(etcd_folder, private=True))
        etcd_url = etcd.url
        servers.append(etcd)
        etcdctl = request.state_dir / "etcdctl"
        etcd.write_etcdctl(etcdctl)
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
        secret="" if secret is None else str(secret),
    )
    return state, servers


def run(request: ServeRequest) -> int:
    """Runs `serve`. Raises what it raises, with KeyboardInterrupt in place of Interrupted."""
    logging.config.dictConfig(logging_config(request.log_format, "serve", 0, level="WARNING"))
    startup_checks.make_demo_model(_services_here(request.config, request.only))
    try:
        return asyncio.run(serve(request))
    except Interrupted:
        raise KeyboardInterrupt from None
