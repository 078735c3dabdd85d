"""A process that goes on as another component, with the engine that it has.

Each role is a run of its own in the process host: a lease, connections, a status server, endpoints.
Between two runs nothing is left of the process but its engine.
"""

import asyncio
import logging
import logging.config
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol, cast

import msgspec

from dynamo_lite.runtime.etcd.client import free_cancelled_calls
from dynamo_lite.runtime.process.component import Component, Report
from dynamo_lite.runtime.process.host import run_process
from dynamo_lite.runtime.process.role_order import RoleOrder
from dynamo_lite.runtime.process.stop import EXIT_START_FAILED
from dynamo_lite.runtime.tasks import running
from dynamo_lite.serve.child import ChildPlan, load, read_plan
from dynamo_lite.serve.child_process import ChildOrder
from dynamo_lite.services.backend import KeptBackend

logger = logging.getLogger(__name__)

_END_S = 30.0


class SwitchableComponent(Component, Protocol):
    """The worker of one role."""

    @property
    def parts(self) -> KeptBackend: ...


async def run_roles(
    plan: ChildPlan, component: SwitchableComponent, report: Report, order_fd: int
) -> int:
    """Runs the component, and then what orders make of the process. Returns the exit code.

    order_fd: end of a pipe, from which orders are read as JSON lines.
    """
    async with _orders(order_fd) as orders:
        try:
            while True:
                order = orders.next_one()
                code = await run_process(
                    plan.spec, component, _timed(report, component), order=order
                )
                if not order.stands:
                    return code
                # From here on the supervisor counts the process among those of its new role.
                report({"state": "switching"})
                free_cancelled_calls()
                assert order.plan is not None
                plan = read_plan(order.plan)
                logging.config.dictConfig(plan.logging)
                parts = component.parts.in_role(plan.spec)
                component = load(plan.component)(plan.spec.config, plan.spec, parts)
        except Exception as exc:
            logger.exception("the process cannot go on in another role")
            report({"state": "failed", "error": f"{type(exc).__name__}: {exc}"})
            return EXIT_START_FAILED
        finally:
            await _end(component.parts)


async def _end(parts: KeptBackend) -> None:
    """The exit code stays what it is, whatever becomes of the engine."""
    try:
        async with asyncio.timeout(_END_S):
            await parts.end()
    except Exception:
        logger.exception("ending the engine failed or had a timeout")


def _timed(report: Report, component: SwitchableComponent) -> Report:
    """Adds to "ready" how long the engine has taken to change its role."""

    def timed(line: dict[str, Any]) -> None:
        if line.get("state") == "ready" and (took_s := component.parts.change_s) is not None:
            line = {**line, "change_s": took_s}
        report(line)

    return timed


class _Orders:
    """The supervisor's orders: at most one for each role."""

    def __init__(self, reader: asyncio.StreamReader):
        self._reader, self._order = reader, RoleOrder()

    def next_one(self) -> RoleOrder:
        self._order = RoleOrder()
        return self._order

    async def read(self) -> None:
        while line := await self._reader.readline():
            try:
                order = msgspec.json.decode(line, type=ChildOrder)
            except msgspec.DecodeError as exc:
                logger.error("dropped a malformed order of the supervisor: %s", exc)
                continue
            self._order.give(Path(order.plan))


@asynccontextmanager
async def _orders(descriptor: int) -> AsyncIterator[_Orders]:
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", buffering=0)
    )
    orders = _Orders(reader)
    try:
        async with running(orders.read(), name="role orders"):
            yield orders
    finally:
        cast("asyncio.ReadTransport", transport).close()
