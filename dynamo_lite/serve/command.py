"""`dynamo-lite serve`: runs a resolved configuration and returns an exit code."""

import asyncio
import logging.config
import os
import shutil
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dynamo_lite.policy.backoff import Backoff
from dynamo_lite.protocol.errors import ConfigError, StartupError
from dynamo_lite.runtime.address import redact
from dynamo_lite.runtime.process.component import ProcessSpec
from dynamo_lite.runtime.process.logs import LogFormat, logging_config
from dynamo_lite.runtime.process.stop import Interrupted
from dynamo_lite.serve import startup_checks
from dynamo_lite.serve.child import ChildPlan
from dynamo_lite.serve.child_process import Launch
from dynamo_lite.serve.config import GraphConfig, ServiceConfig, child_environment
from dynamo_lite.serve.embedded import EmbeddedEtcd, EmbeddedNats
from dynamo_lite.serve.lease_revoker import LeaseRevoker
from dynamo_lite.serve.ports import shared_port
from dynamo_lite.serve.progress import Progress
from dynamo_lite.serve.run_state import RunFile, RunState, lock, read_run, write_private
from dynamo_lite.serve.server_supervisor import Server
from dynamo_lite.serve.supervisor import StopSignals, Supervisor
from dynamo_lite.services.services import Graph
from dynamo_lite.vllm.args import engine_flags

_MAX_LONE_SERVICES = 1000

#: Marker file of a folder that holds only an embedded server's data, so may be emptied.
_MARKER = ".dynamo-lite-embedded"


@dataclass(frozen=True, kw_only=True)
class ServeRequest:
    """What one `dynamo-lite serve` was asked to run."""

    graph_name: str
    graph: Graph
    config: GraphConfig
    state_dir: Path
    #: None: an embedded server, or with `only` that of the running graph.
    nats_url: str | None = None
    #: As `nats_url`.
    etcd_url: str | None = None
    #: The one service to start; None: the whole graph.
    only: str | None = None
    #: A level name of the logging module.
    log_level: str = "INFO"
    log_format: LogFormat = "text"


async def serve(request: ServeRequest) -> int:
    """Runs until stopped.

    Raises ConfigError, StartupError, and Interrupted when it is stopped before any process
    of the graph was started. No process is left running then.
    """
    signals = StopSignals()
    progress = Progress()
    started = _services_here(request)
    for service in started:
        startup_checks.check_port(service)
        if service.service.flags != "none":
            startup_checks.check_model(service)
            startup_checks.check_tls(service)
    async with AsyncExitStack() as stack:
        stack.enter_context(signals.installed())
        started = [stack.enter_context(shared_port(service)) for service in started]
        directory = _lock_directory(request, stack)
        async with signals.stop.interrupts():
            nats_url, etcd_url, servers = await _connect(request, stack, progress)
        if signals.stop.is_set:
            raise Interrupted
        run = RunFile(
            directory / "run.json",
            RunState(
                pid=os.getpid(),
                started_at=time.time(),
                graph=request.graph_name,
                namespace=request.config.shared.namespace,
                nats=nats_url,
                etcd=etcd_url,
            ),
        )
        stack.callback(run.remove)
        tiers = [_launches(request, s, directory, nats_url, etcd_url) for s in started]
        shared = request.config.shared
        supervisor = Supervisor(
            tiers,
            servers,
            run,
            signals,
            progress,
            LeaseRevoker(etcd_url),
            grace_s=shared.grace_s,
            backoff=Backoff(longest_s=shared.restart_max_s),
        )
        return await supervisor.run()


def _services_here(request: ServeRequest) -> list[ServiceConfig]:
    """The services that this command starts processes for, in drain order."""
    outer = [c for c in request.config.services if c.service.component]
    if request.only is None:
        return outer
    return [c for c in outer if c.service.name == request.only]


def _lock_directory(request: ServeRequest, stack: AsyncExitStack) -> Path:
    """Locks the state directory, or for a lone service a subdirectory of it."""
    if request.only is None:
        if stack.enter_context(lock(request.state_dir)):
            return request.state_dir
        holder = read_run(request.state_dir)
        who = f" (pid {holder.pid}, {holder.http or holder.graph})" if holder else ""
        message = f"a graph runs on state directory {request.state_dir}{who}"
        raise StartupError(f"{message}; stop it or use --state-dir")
    for number in range(_MAX_LONE_SERVICES):
        directory = request.state_dir / "lone" / f"{request.only}-{number}"
        if stack.enter_context(lock(directory)):
            return directory
    where = f"{request.state_dir}; use another --state-dir"
    raise StartupError(f"more than {_MAX_LONE_SERVICES} lone services in {where}")


async def _connect(
    request: ServeRequest, stack: AsyncExitStack, progress: Progress
) -> tuple[str, str, list[Server]]:
    """Returns the URLs of NATS and etcd, and the embedded servers that were started for them."""
    nats_url, etcd_url = request.nats_url, request.etcd_url
    if request.only is not None and (nats_url is None or etcd_url is None):
        running = read_run(request.state_dir)
        if running is None:
            message = "--service-name needs --nats-url and --etcd-url"
            raise ConfigError([f"{message}, because no graph runs on {request.state_dir}"])
        nats_url, etcd_url = nats_url or running.nats, etcd_url or running.etcd
    servers: list[Server] = []
    await startup_checks.check_servers(nats_url, etcd_url)
    data = request.state_dir / "embedded"
    for name, url in (("nats", nats_url), ("etcd", etcd_url)):
        if url is None:
            _empty_folder(data / name)
    if nats_url is None:
        nats = await stack.enter_async_context(EmbeddedNats(data / "nats"))
        nats_url = nats.url
        servers.append(nats)
    if etcd_url is None:
        etcd = await stack.enter_async_context(EmbeddedEtcd(data / "etcd"))
        etcd_url = etcd.url
        servers.append(etcd)
    progress.line("serve", f"NATS {redact(nats_url)}, etcd {redact(etcd_url)}")
    return nats_url, etcd_url, servers


def _empty_folder(directory: Path) -> None:
    """Makes an empty folder for an embedded server; data of an earlier run is removed.

    Raises ConfigError, and removes nothing, when the folder has files but no marker file;
    StartupError when it cannot be emptied.
    """
    marker = directory / _MARKER
    try:
        directory.mkdir(parents=True, exist_ok=True)
        content = [path for path in directory.iterdir() if path != marker]
        if content and not marker.is_file():
            raise ConfigError(
                [
                    f"--state-dir: {directory} is not empty and has no marker file {_MARKER}, so it"
                    " may hold foreign data; nothing was removed; choose another --state-dir"
                ]
            )
        # Written first and never removed: the next start knows the folder of a killed one.
        marker.touch()
        for path in content:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    except OSError as exc:
        raise StartupError(f"cannot empty the embedded server's folder {directory}: {exc}") from exc


def _launches(
    request: ServeRequest, config: ServiceConfig, directory: Path, nats_url: str, etcd_url: str
) -> list[Launch]:
    service, shared = config.service, request.config.shared
    inner = {s.name: request.config.get(s.name) for s in request.graph.inner(service)}
    launches: list[Launch] = []
    for folder in ("logs", "plans"):
        (directory / folder).mkdir(parents=True, exist_ok=True)
    for instance, env in enumerate(config.env):
        spec = ProcessSpec(
            namespace=shared.namespace,
            component=service.name,
            instance=instance,
            instances=config.workers,
            nats_url=nats_url,
            etcd_url=etcd_url,
            state_dir=str(directory.resolve()),
            bind_host=shared.bind_host,
            lease_ttl_s=shared.lease_ttl_s,
            grace_s=shared.grace_s,
            config=config.options,
            engine_args=engine_flags(config.flags),
            inner={name: c.options for name, c in inner.items() if c is not None},
            watch_component=service.calls,
            tracing=shared.tracing,
        )
        environment = child_environment(env)
        logs = logging_config(
            request.log_format,
            service.name,
            instance,
            level=request.log_level,
            vllm_level=environment.get("VLLM_LOGGING_LEVEL", "INFO").upper(),
        )
        plan = ChildPlan(component=service.component, spec=spec, logging=logs)
        name = f"{service.name}-{instance}"
        if "VLLM_CONFIGURE_LOGGING" not in environment:
            logs_path = directory.resolve() / "plans" / f"{name}.logging.json"
            write_private(logs_path, msgspec.json.encode(logs))
            environment.setdefault("VLLM_LOGGING_CONFIG_PATH", str(logs_path))
        launch = Launch(
            service=service.name,
            instance=instance,
            plan_path=directory / "plans" / f"{name}.json",
            log_path=directory / "logs" / f"{name}.log",
            env=environment,
        )
        write_private(launch.plan_path, msgspec.json.encode(plan))
        launch.log_path.write_bytes(b"")
        launches.append(launch)
    return launches


def run(request: ServeRequest) -> int:
    """Runs `serve`. Raises KeyboardInterrupt in place of Interrupted."""
    logging.config.dictConfig(logging_config(request.log_format, "serve", 0, level="WARNING"))
    try:
        return asyncio.run(serve(request))
    except Interrupted:
        raise KeyboardInterrupt from None
