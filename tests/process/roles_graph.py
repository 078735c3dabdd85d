"""A graph with workers of both roles: decode workers with null engines, stand-ins for prefill
workers that only report what a file tells them, and the shipped Frontend."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dynamo_lite.serve.services.services import FRONTEND, Graph, Service
from tests.process import null_graph


@dataclass(frozen=True, kw_only=True)
class StandInConfig:
    """facts: a folder with a JSON file for each number of a process: what it reports."""

    facts: str = ""


class StandIn:
    def __init__(self, config: dict[str, Any]):
        self._facts_of = Path(config["facts"])

    async def start(self, host: Any) -> dict[str, Any]:
        self._file = self._facts_of / f"{host.spec.instance}.json"
        await host.register("prefill")
        return {}

    async def drain(self, grace_s: float) -> None:
        while self._facts().get("jobs"):
            await asyncio.sleep(0.02)

    def health(self) -> Mapping[str, Any]:
        return {"ok": True, **self._facts()}

    def _facts(self) -> dict[str, Any]:
        return json.loads(self._file.read_text()) if self._file.exists() else {}


[_worker] = null_graph.Worker.services
_NULL = replace(_worker, scalable=True)
_STAND_IN = Service(
    name="PrefillWorker", config=StandInConfig, component=f"{__name__}:StandIn", scalable=True
)
_served = FRONTEND.link(replace(_NULL, flags="engine"))
#: The shipped Frontend.
Served = replace(_served, services=(*_served.services, _STAND_IN))
#: Without the Frontend.
Workers = Graph(services=(_NULL, _STAND_IN))
#: The stand-ins alone.
Prefilling = Graph(services=(_STAND_IN,))
