"""The graph of `scripts/planner_check --null`: the shipped planner, Frontend and decode worker over
engines that compute nothing, and stand-ins for prefill workers."""

from typing import Any

from dynamo_lite.runtime.process.component import Host
from dynamo_lite.services.services import FRONTEND, PLANNER, PROCESSOR, Service
from tests.process.null_graph import NullWorkerConfig
from tests.process.prefill_reports import PERIOD_S, Period, report_prefills
from tests.process.roles_graph import PREFILL, PromptWorker

#: While a worker has requests: what it reports to have asked for, and what one prefill worker
#: writes, in tokens per second. Two prefill workers are needed.
_ASKED_RATE, _WRITTEN_RATE = 1200, 1000
_JOBS = 2


class ReportingWorker(PromptWorker):
    """Reports, while it has requests, that prefill workers compute for it."""

    async def start(self, host: Host) -> dict[str, Any]:
        facts = await super().start(host)
        host.spawn(report_prefills(host, self._period), "prefill-reports")
        return facts

    def _period(self) -> Period:
        if not self.health()["running"]:
            return Period()
        return Period(
            asked=_ASKED_RATE * PERIOD_S,
            written=_WRITTEN_RATE * PERIOD_S,
            busy_s=PERIOD_S,
            jobs=_JOBS,
        )


_DECODE = Service(
    name="VllmWorker",
    config=NullWorkerConfig,
    component=f"{__name__}:ReportingWorker",
    scalable=True,
    flags="engine",
).with_defaults(remote_prefill=False)
Frontend = PLANNER.link(FRONTEND).link(PROCESSOR).link(_DECODE).link(PREFILL)
