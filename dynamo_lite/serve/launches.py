"""Prepares the processes of one service: their plans, environments and log files."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dynamo_lite.runtime.certificates import with_files
from dynamo_lite.runtime.process.component import ProcessSpec
from dynamo_lite.runtime.process.logs import LogFormat, logging_config
from dynamo_lite.serve.child import ChildPlan
from dynamo_lite.serve.child_environment import DEVICES, child_environment
from dynamo_lite.serve.config import GraphConfig, ServiceConfig
from dynamo_lite.serve.run_state import RunState, write_private
from dynamo_lite.vllm.args import engine_flags


@dataclass(frozen=True, kw_only=True)
class ServeRequest:
    graph_name: str
    config: GraphConfig
    state_dir: Path
    #: None: start an embedded server, or for a lone service use the server of the running graph.
    nats_url: str | None = None
    #: See `nats_url`.
    etcd_url: str | None = None
    #: A level name of the logging module.
    log_level: str = "INFO"
    log_format: LogFormat = "text"
    #: Whether the processes' output goes to stderr, not to files.
    log_to_stderr: bool = False


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What is needed to start one process of a service, any number of times."""

    service: str
    instance: int
    #: Its last argument is missing: the descriptor of the pipe for reports.
    command: tuple[str, ...]
    #: File with its output; None: the supervisor's stderr.
    log_path: Path | None
    #: Its whole environment.
    env: Mapping[str, str]
    #: The devices of the host that it occupies.
    devices: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.service}-{self.instance}"


def prepare(
    request: ServeRequest,
    service: ServiceConfig,
    place: RunState,
    directory: Path,
    instance: int,
    devices: tuple[str, ...],
) -> Launch:
    """Writes the plan and empties the log of one process.

    place: has the URLs of the servers and the folder of the certificates. directory: where plans
    and logs go; they may contain credentials. devices: that it occupies.
    """
    shared, component = request.config.shared, service.service.name
    name, first_port = f"{component}-{instance}", service.status_port
    plans, logs = directory / "plans", directory / "logs"
    for folder in (plans, logs):
        folder.mkdir(parents=True, exist_ok=True)
    own = dict(service.env)
    if devices:
        own[DEVICES] = ",".join(devices)
    environment = child_environment(own, shared.bind_host, shared.lease_ttl_s, service.flags)
    log_settings = logging_config(
        request.log_format,
        component,
        instance,
        level=request.log_level,
        vllm_level=environment.get("VLLM_LOGGING_LEVEL", "INFO").upper(),
    )
    if "VLLM_CONFIGURE_LOGGING" not in environment:
        settings_path = plans.resolve() / f"{name}.logging.json"
        write_private(settings_path, msgspec.json.encode(log_settings))
        environment.setdefault("VLLM_LOGGING_CONFIG_PATH", str(settings_path))
    spec = ProcessSpec(
        namespace=shared.namespace,
        component=component,
        instance=instance,
        instances=service.workers,
        nats_url=with_files(place.nats, place.folder, component),
        etcd_url=with_files(place.etcd, place.folder, component),
        certificates=place.certificates or None,
        state_dir=str(directory.resolve()),
        bind_host=shared.bind_host,
        status_port=first_port + instance if first_port else 0,
        lease_ttl_s=shared.lease_ttl_s,
        grace_s=shared.grace_s,
        config=service.options,
        engine_args=engine_flags(service.flags),
        watch_component=service.service.calls,
        tracing=shared.tracing,
    )
    plan = ChildPlan(component=service.service.component, spec=spec, logging=log_settings)
    path, log = plans / f"{name}.json", logs / f"{name}.log"
    write_private(path, msgspec.json.encode(plan))
    if not request.log_to_stderr:
        log.write_bytes(b"")
    return Launch(
        service=component,
        instance=instance,
        command=(sys.executable, "-m", "dynamo_lite.serve.child", str(path)),
        log_path=None if request.log_to_stderr else log,
        env=environment,
        devices=devices,
    )
