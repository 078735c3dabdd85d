"""Waits for the first of several: the others end, and no failure is silent."""

import asyncio

import pytest

from dynamo_lite.runtime.tasks import first_of
from tests.builders import loop_time
from tests.unit.virtual import virtual


async def after(seconds: float, exc: Exception | None = None) -> None:
    await asyncio.sleep(seconds)
    if exc is not None:
        raise exc


async def fails_on_its_way_out() -> None:
    try:
        await asyncio.Event().wait()
    finally:
        raise ValueError("on its way out")


@pytest.mark.parametrize(("timeout_s", "waited_s"), [(None, 2.0), (5.0, 2.0), (0.5, 0.5)])
def test_it_waits_for_the_first_and_ends_the_others(timeout_s: float | None, waited_s: float):
    @virtual
    async def body() -> None:
        began = loop_time()
        await first_of(after(2.0), after(3.0), asyncio.Event().wait(), timeout_s=timeout_s)
        assert loop_time() == began + waited_s
        assert asyncio.all_tasks() == {asyncio.current_task()}

    body()


def test_the_failure_of_one_is_raised():
    @virtual
    async def body() -> None:
        with pytest.raises(ValueError, match="early"):
            await first_of(after(2.0), after(1.0, ValueError("early")))
        with pytest.raises(ValueError, match="on its way out"):
            await first_of(after(1.0), fails_on_its_way_out())
        with pytest.raises(ValueError, match="one"):
            await first_of(after(1.0, ValueError("one")), after(1.0, ValueError("two")))
        assert asyncio.all_tasks() == {asyncio.current_task()}

    body()


def test_a_cancel_ends_all():
    @virtual
    async def body() -> None:
        waiting = asyncio.create_task(first_of(after(2.0), fails_on_its_way_out()))
        await asyncio.sleep(1.0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert asyncio.all_tasks() == {asyncio.current_task()}

    body()
