"""What stand-ins for decode workers report to a planner."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping

from dynamo_lite.protocol import names
from dynamo_lite.protocol.backlog import Backlog
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.errors import Unavailable
from dynamo_lite.runtime.process.component import Host

PERIOD_S = 0.2


async def report_backlog(host: Host, counted: Callable[[], Mapping[str, int]]) -> None:
    """Every `PERIOD_S`, until it is cancelled. counted: fields of `Backlog`."""
    number, subject = 0, names.backlog_subject(host.spec.namespace)
    while True:
        number += 1
        backlog = Backlog(engine_id=f"e{host.lease.id:x}", number=number, **counted())  # type: ignore[arg-type]
        with contextlib.suppress(Unavailable):
            await host.messaging.publish(subject, encode(backlog))
        await asyncio.sleep(PERIOD_S)
