"""A graph with a planner and workers that only report a load, which they read from a file."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo_lite.protocol import names
from dynamo_lite.runtime.members.roster import Roster
from dynamo_lite.runtime.process.component import Host
from dynamo_lite.serve.services.services import PLANNER, Graph, Service
from tests.process.prefill_reports import PERIOD_S, Period, report_prefills

#: Of a prefill worker, in tokens per second.
_RATE = 1000


@dataclass(frozen=True, kw_only=True)
class LoadedConfig:
    """load: a JSON file with the load of all workers together: `requests`, `kv` (in workers) and
    `tokens_per_s`, `jobs` of prefill."""

    load: str = ""


class LoadedWorker:
    def __init__(self, config: dict[str, Any]):
        self._config = config
        self._roster: Roster | None = None
        self._host: Host | None = None

    async def start(self, host: Host) -> dict[str, Any]:
        self._host = host
        decodes = host.spec.component == "VllmWorker"
        endpoint = "generate" if decodes else "prefill"
        prefix = names.endpoint_prefix(host.spec.namespace, host.spec.component, endpoint)
        self._roster = await host.stack.enter_async_context(Roster(host.store, prefix, host.drops))
        await host.register(endpoint)
        if decodes:
            prefix = names.endpoint_prefix(host.spec.namespace, "PrefillWorker", "prefill")
            roster = Roster(host.store, prefix, host.drops)
            self._prefill = await host.stack.enter_async_context(roster)
            host.spawn(report_prefills(host, self._period), "prefill-reports")
        return {}

    async def drain(self, grace_s: float) -> None:
        pass

    def health(self) -> dict[str, Any]:
        """Its share of the load."""
        load, number = self._load(), len(self._roster.members) if self._roster else 1
        return {
            "ok": True,
            "running": round(load.get("requests", 0) / max(number, 1)),
            "waiting": 0,
            "kv_usage": min(load.get("kv", 0.0) / max(number, 1), 1.0),
            "max_running": 10,
        }

    def _period(self) -> Period:
        """The decode worker with the lowest lease tells of all workers."""
        load = self._load()
        assert self._roster is not None and self._host is not None
        leases = sorted(member.lease_id for member in self._roster.members)
        if leases[:1] != [self._host.lease.id]:
            return Period()
        jobs = load.get("jobs", 0)
        busy_s = PERIOD_S * min(jobs, len(self._prefill.members))
        return Period(
            asked=load.get("tokens_per_s", 0) * PERIOD_S,
            written=_RATE * busy_s,
            busy_s=busy_s,
            jobs=jobs,
        )

    def _load(self) -> dict[str, Any]:
        path = Path(self._config["load"])
        try:
            return json.loads(path.read_text()) if path.is_file() else {}
        except ValueError:  # it is being written
            return {}


def _workers(name: str) -> Service:
    return Service(
        name=name,
        config=LoadedConfig,
        component="tests.process.planned:LoadedWorker",
        scalable=True,
    )


Planned = Graph(services=(PLANNER, _workers("VllmWorker"), _workers("PrefillWorker")))
