"""Prepares the processes of one service: their plans, environments and log files."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

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


class Launches:
    """Makes launches of one service, also while the graph runs.

    directory: where plans and logs go; they may contain credentials. place: has the URLs of the
    servers and the folder of the certificates.
    """

    def __init__(
        self, request: ServeRequest, service: ServiceConfig, directory: Path, place: RunState
    ):
        self.service = service
        self._request = request
        self._directory, self._place = directory, place

    def make(self, instance: int, devices: tuple[str, ...]) -> Launch:
        """Writes the plan and empties the log of one process. devices: that it occupies."""
        name = f"{self.service.service.name}-{instance}"
        plans, logs = self._directory / "plans", self._directory / "logs"
        for folder in (plans, logs):
            folder.mkdir(parents=True, exist_ok=True)
        shared = self._request.config.shared
        own = dict(self.service.env)
        # A number of devices is only counted.
        if devices and not isinstance(shared.devices, int):
            own[DEVICES] = ",".join(devices)
        environment = child_environment(own, shared.bind_host, shared.lease_ttl_s)
        log_settings = logging_config(
            self._request.log_format,
            self.service.service.name,
            instance,
            level=self._request.log_level,
            vllm_level=environment.get("VLLM_LOGGING_LEVEL", "INFO").upper(),
        )
        if "VLLM_CONFIGURE_LOGGING" not in environment:
            settings_path = plans.resolve() / f"{name}.logging.json"
            write_private(settings_path, msgspec.json.encode(log_settings))
            environment.setdefault("VLLM_LOGGING_CONFIG_PATH", str(settings_path))
        plan = ChildPlan(
            component=self.service.service.component,
            spec=self._spec(instance),
            logging=log_settings,
        )
        path, log = plans / f"{name}.json", logs / f"{name}.log"
        write_private(path, msgspec.json.encode(plan))
        if not self._request.log_to_stderr:
            log.write_bytes(b"")
        return Launch(
            service=self.service.service.name,
            instance=instance,
            command=(sys.executable, "-m", "dynamo_lite.serve.child", str(path)),
            log_path=None if self._request.log_to_stderr else log,
            env=environment,
            devices=devices,
        )

    def _spec(self, instance: int) -> ProcessSpec:
        service, config, place = self.service.service, self._request.config, self._place
        shared, first_port = config.shared, self.service.status_port
        return ProcessSpec(
            namespace=shared.namespace,
            component=service.name,
            instance=instance,
            instances=self.service.workers,
            nats_url=place.nats_url(service.name),
            etcd_url=place.etcd_url(service.name),
            certificates=place.certificates or None,
            state_dir=str(self._directory.resolve()),
            bind_host=shared.bind_host,
            status_port=first_port + instance if first_port else 0,
            lease_ttl_s=shared.lease_ttl_s,
            grace_s=shared.grace_s,
            config=self.service.options,
            engine_args=engine_flags(self.service.flags),
            watch_component=service.calls,
            tracing=shared.tracing,
        )
