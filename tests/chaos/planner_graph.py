"""The graph of `scripts/planner_check --null`: the shipped planner, Frontend and decode worker over
engines that compute nothing, and stand-ins for prefill workers."""

import asyncio
from typing import Any

from dynamo_lite.protocol import names
from dynamo_lite.protocol.backlog import Backlog
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.errors import Unavailable
from dynamo_lite.runtime.process.component import Host
from dynamo_lite.services.services import FRONTEND, PLANNER, PROCESSOR, Service
from tests.process.null_graph import NullWorkerConfig
from tests.process.switch_graph import PREFILL, PromptWorker

_PERIOD_S = 0.2
#: While a worker has requests: what it reports to have asked for, and to be done by one prefill
#: worker, in tokens per second. Two prefill workers are needed.
_ASKED_RATE, _DONE_RATE = 1200, 1000
_JOBS = 2


class ReportingWorker(PromptWorker):
    """Reports, while it has requests, that prefill workers compute for it."""

    async def start(self, host: Host) -> dict[str, Any]:
        facts = await super().start(host)
        host.spawn(self._report(host), "backlog")
        return facts

    async def _report(self, host: Host) -> None:
        number, asked, done = 0, 0.0, 0.0
        while True:
            number += 1
            jobs = _JOBS if self.health()["running"] else 0
            if jobs:
                asked += _ASKED_RATE * _PERIOD_S
                done += _DONE_RATE * _PERIOD_S
            backlog = Backlog(
                engine_id=f"e{host.lease.id:x}",
                number=number,
                asked_tokens=round(asked),
                done_tokens=round(done),
                claimed_jobs=jobs,
            )
            try:
                subject = names.backlog_subject(host.spec.namespace)
                await host.messaging.publish(subject, encode(backlog))
            except Unavailable:
                pass
            await asyncio.sleep(_PERIOD_S)


_DECODE = Service(
    name="VllmWorker",
    config=NullWorkerConfig,
    component=f"{__name__}:ReportingWorker",
    scalable=True,
    flags="engine",
).with_defaults(remote_prefill=False)
Frontend = PLANNER.link(FRONTEND).link(PROCESSOR).link(_DECODE).link(PREFILL)
