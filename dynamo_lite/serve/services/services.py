"""Services and graphs as values.

A service says what a process of its kind runs and which options it has. A graph is a tuple of
services. Both are frozen: importing two graphs in one process cannot make one change the other.
Nothing heavy is imported here: a component's class is named by its dotted path and imported by the
child process alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from dynamo_lite.forward.options import ForwarderConfig
from dynamo_lite.planner.config import PlannerConfig
from dynamo_lite.serve.services.config import (
    FrontendConfig,
    PrefillWorkerConfig,
    RouterConfig,
    VllmWorkerConfig,
)

#: The flags that a section accepts besides our own options: none, the engine's (AsyncEngineArgs)
#: or those of vLLM's whole OpenAI server.
FlagKind = Literal["none", "engine", "frontend"]


@dataclass(frozen=True, kw_only=True)
class Service:
    """One kind of process."""

    name: str
    #: The dataclass of its own options.
    config: type
    #: "module:Class" with the constructor (config).
    component: str
    #: See FlagKind.
    flags: FlagKind = "none"
    #: The service whose `generate` endpoint it uses.
    calls: str = ""
    #: Whether processes of it may be added and retired while the graph runs.
    scalable: bool = False
    #: Options (snake_case) that differ from the dataclass's defaults.
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def with_defaults(self, **options: Any) -> "Service":
        return replace(self, defaults={**self.defaults, **options})

    def link(self, other: "Service") -> "Graph":
        return Graph(services=(self,)).link(other)


@dataclass(frozen=True, kw_only=True)
class Graph:
    """Services in the order in which they are drained: callers before callees."""

    services: tuple[Service, ...]

    def __post_init__(self) -> None:
        names = [service.name for service in self.services]
        if len(set(names)) != len(names):
            raise ValueError(f"a service occurs twice in {names}")

    def link(self, other: Service) -> "Graph":
        return Graph(services=(*self.services, other))

    def missing(self) -> list[str]:
        """Names of services that others refer to and the graph does not have."""
        names = {service.name for service in self.services}
        return sorted({s.calls for s in self.services if s.calls} - names)


FRONTEND = Service(
    name="Frontend",
    config=FrontendConfig,
    component="dynamo_lite.serve.services.frontend.frontend:Frontend",
    flags="frontend",
    calls="VllmWorker",
)

ROUTER = Service(
    name="Router",
    config=RouterConfig,
    component="dynamo_lite.serve.services.router:Router",
    calls="VllmWorker",
)

VLLM_WORKER = Service(
    name="VllmWorker",
    config=VllmWorkerConfig,
    component="dynamo_lite.serve.services.decode_worker:VllmWorker",
    flags="engine",
    scalable=True,
)

PREFILL_WORKER = Service(
    name="PrefillWorker",
    config=PrefillWorkerConfig,
    component="dynamo_lite.serve.services.prefill_worker:PrefillWorker",
    flags="engine",
    scalable=True,
)

PLANNER = Service(
    name="Planner",
    config=PlannerConfig,
    component="dynamo_lite.planner.planner:Planner",
)

FORWARDER = Service(
    name="Forwarder",
    config=ForwarderConfig,
    component="dynamo_lite.forward.forwarder:Forwarder",
)

EVERY_SERVICE = (FRONTEND, ROUTER, VLLM_WORKER, PREFILL_WORKER, PLANNER, FORWARDER)
