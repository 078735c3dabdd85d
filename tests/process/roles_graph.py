"""Graphs with workers of both roles: decode workers with null engines, stand-ins for prefill
workers, and a client of them or the shipped Frontend."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dynamo_lite.serve.services.services import FRONTEND, PLANNER, PROCESSOR, Graph, Service
from tests.process import null_graph
from tests.process.fleet_graph import PACED, CallerConfig, FleetWorker
from tests.process.prefill_reports import Period, report_prefills


async def _file(path: str) -> None:
    """Waits for a file; not at all without a name."""
    while path and not Path(path).exists():
        await asyncio.sleep(0.02)


@dataclass(frozen=True, kw_only=True)
class TellingConfig(null_graph.NullWorkerConfig):
    """start_if: a file without which a start waits."""

    start_if: str = ""


class TellingWorker(FleetWorker):
    """Also reports to the planner that no prompt goes to prefill workers."""

    def __init__(self, config: dict[str, Any], spec: Any):
        own = dict(config)
        self._start_if = own.pop("start_if")
        super().__init__(own, spec)

    async def start(self, host: Any) -> dict[str, Any]:
        await _file(self._start_if)
        facts = await super().start(host)
        host.spawn(report_prefills(host, Period), "prefill-reports")
        return facts


@dataclass(frozen=True, kw_only=True)
class IdleConfig:
    """leave_if: a file without which a drain waits."""

    leave_if: str = ""


class IdleWorker:
    """A prefill worker without a job."""

    def __init__(self, config: dict[str, Any], spec: Any):
        self._config = IdleConfig(**config)

    async def start(self, host: Any) -> dict[str, Any]:
        await host.register("prefill")
        return {}

    async def drain(self, grace_s: float) -> None:
        await _file(self._config.leave_if)

    async def close(self) -> None: ...

    def health(self) -> Mapping[str, Any]:
        return {"ok": True, "jobs": 0}


PREFILL = Service(
    name="PrefillWorker",
    config=IdleConfig,
    component=f"{__name__}:IdleWorker",
    scalable=True,
)
_DECODE = Service(
    name="VllmWorker", config=TellingConfig, component=f"{__name__}:TellingWorker", scalable=True
).with_defaults(**PACED)
_CALLER = Service(name="Caller", config=CallerConfig, component="tests.process.fleet_graph:Caller")


Called = Graph(services=(_CALLER, _DECODE, PREFILL))
Planned = Graph(services=(_CALLER, PLANNER, _DECODE, PREFILL))


def told(prompt: list[int], position: int) -> int:
    """The token at a position of the answer to a prompt: a letter of the tiny model."""
    return null_graph.FIRST_TOKEN + (prompt[0] + position) % len(null_graph.LETTERS)


class PromptBackend(null_graph.NullBackend):
    token_at = staticmethod(told)


class PromptWorker(null_graph.NullWorker):
    """Component. Its answers differ with their prompts."""

    backend = PromptBackend


_NULL = Service(
    name="VllmWorker",
    config=null_graph.NullWorkerConfig,
    component=f"{__name__}:PromptWorker",
    scalable=True,
    flags="engine",
).with_defaults(remote_prefill=False)
_served = FRONTEND.link(PROCESSOR).link(_NULL)
#: The shipped Frontend.
Served = replace(_served, services=(*_served.services, PREFILL))
