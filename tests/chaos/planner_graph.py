"""The graph of `scripts/planner_check --null`: the shipped planner, Frontend and decode worker over
engines that compute nothing, and stand-ins for prefill workers."""

from typing import Any

from dynamo_lite.runtime.process.component import Host
from dynamo_lite.services.services import FRONTEND, PLANNER, PROCESSOR, Service
from tests.process.backlog_reports import PERIOD_S, report_backlog
from tests.process.null_graph import NullWorkerConfig
from tests.process.roles_graph import PREFILL, PromptWorker

#: While a worker has requests: what it reports to have asked for, and to be done by one prefill
#: worker, in tokens per second. Two prefill workers are needed.
_ASKED_RATE, _DONE_RATE = 1200, 1000
_JOBS = 2


class ReportingWorker(PromptWorker):
    """Reports, while it has requests, that prefill workers compute for it."""

    _asked = _done = 0.0

    async def start(self, host: Host) -> dict[str, Any]:
        facts = await super().start(host)
        host.spawn(report_backlog(host, self._counted), "backlog")
        return facts

    def _counted(self) -> dict[str, int]:
        if not self.health()["running"]:
            return {"asked_tokens": round(self._asked), "done_tokens": round(self._done)}
        self._asked += _ASKED_RATE * PERIOD_S
        self._done += _DONE_RATE * PERIOD_S
        return {
            "asked_tokens": round(self._asked),
            "done_tokens": round(self._done),
            "claimed_jobs": _JOBS,
        }


_DECODE = Service(
    name="VllmWorker",
    config=NullWorkerConfig,
    component=f"{__name__}:ReportingWorker",
    scalable=True,
    flags="engine",
).with_defaults(remote_prefill=False)
Frontend = PLANNER.link(FRONTEND).link(PROCESSOR).link(_DECODE).link(PREFILL)
