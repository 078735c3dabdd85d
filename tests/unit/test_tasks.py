"""Tasks end with their owner, also when a cancel is lost, and fail loudly."""

import asyncio
import logging

import pytest

from dynamo_lite.runtime.tasks import (
    CANCEL_AGAIN_S,
    OwnedTasks,
    end_tasks,
    first_of,
    needed,
    running,
)
from tests.builders import loop_time
from tests.unit.virtual import virtual


async def forever() -> None:
    await asyncio.Event().wait()


async def loses_cancels(count: int) -> None:
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if count == 0:
                raise
            count -= 1


async def fails(exc: Exception) -> None:
    raise exc


async def cleans_up_for(seconds: float, ended: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(seconds)
        ended.append("cleaned up")


@pytest.mark.parametrize("lost", [0, 1, 3])
@virtual
async def test_a_lost_cancel_is_repeated_until_the_task_has_ended(lost: int):
    task = asyncio.create_task(loses_cancels(lost))
    await asyncio.sleep(1)
    began = loop_time()
    await end_tasks(task)
    assert task.cancelled()
    assert loop_time() - began == pytest.approx(lost * CANCEL_AGAIN_S)
    # Ended tasks and no tasks need no wait.
    began = loop_time()
    await end_tasks(task)
    await end_tasks()
    assert loop_time() == began


@virtual
async def test_a_clean_up_that_keeps_its_deadline_is_not_interrupted():
    ended: list[str] = []
    task = asyncio.create_task(cleans_up_for(CANCEL_AGAIN_S - 1, ended))
    await asyncio.sleep(1)
    await end_tasks(task)
    assert ended == ["cleaned up"]


@virtual
async def test_the_callers_cancel_is_raised_after_the_tasks_have_ended():
    task = asyncio.create_task(loses_cancels(1))
    await asyncio.sleep(1)
    began = loop_time()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(2):
            await end_tasks(task)
    assert task.cancelled()
    assert loop_time() - began == pytest.approx(2)


@virtual
async def test_a_task_cannot_end_itself():
    async def ends_itself() -> None:
        task = asyncio.current_task()
        assert task is not None
        await end_tasks(task)

    with pytest.raises(RuntimeError, match="its own end"):
        await asyncio.create_task(ends_itself())


@virtual
async def test_leaving_the_context_ends_what_still_runs():
    async with OwnedTasks() as tasks:
        long = tasks.start(forever(), name="long")
        stubborn = tasks.start(loses_cancels(1), name="stubborn")
        short = tasks.start(asyncio.sleep(0, "result"), name="short")
        assert await short == "result"
        assert len(tasks) == 2
    assert long.cancelled() and stubborn.cancelled()
    assert len(tasks) == 0


@virtual
async def test_what_is_started_while_the_tasks_end_is_ended_too():
    tasks = OwnedTasks()
    late: list[asyncio.Task[None]] = []

    async def starts_another() -> None:
        try:
            await forever()
        finally:
            late.append(tasks.start(forever(), name="late"))

    tasks.start(starts_another(), name="first")
    await asyncio.sleep(1)
    await tasks.end()
    assert [task.cancelled() for task in late] == [True]
    assert len(tasks) == 0


@virtual
async def test_join_waits_for_all_and_ends_them_when_it_is_cancelled():
    tasks = OwnedTasks()
    tasks.start(asyncio.sleep(5), name="short")
    began = loop_time()
    await tasks.join()
    assert loop_time() - began == pytest.approx(5)
    long = tasks.start(forever(), name="long")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await tasks.join()
    assert long.cancelled()


@virtual
async def test_a_failure_is_logged_at_once_and_the_others_go_on(caplog: pytest.LogCaptureFixture):
    async with OwnedTasks() as tasks:
        other = tasks.start(forever(), name="other")
        tasks.start(fails(ValueError("no such thing")), name="follower")
        await asyncio.sleep(1)
        (logged,) = caplog.records
        assert logged.levelno == logging.ERROR
        assert logged.getMessage() == "task follower failed"
        assert "no such thing" in caplog.text
        assert not other.done()


@virtual
async def test_a_body_ends_with_the_failure_of_a_task_that_it_needs(
    caplog: pytest.LogCaptureFixture,
):
    left: list[str] = []
    lost = asyncio.Event()

    async def follows() -> None:
        await lost.wait()
        raise ValueError("lost")

    with pytest.raises(ValueError, match="lost"):
        async with needed() as on_failure:
            async with running(follows(), name="follower", on_failure=on_failure):
                try:
                    lost.set()
                    await forever()
                finally:
                    await asyncio.sleep(1)  # what is cleaned up is not cut short
                    left.append("body")
    task = asyncio.current_task()
    assert task is not None and not task.cancelling()
    await asyncio.sleep(1)
    assert left == ["body"]
    assert [record.getMessage() for record in caplog.records] == ["task follower failed"]


@virtual
async def test_only_the_first_failure_of_needed_tasks_ends_the_body(
    caplog: pytest.LogCaptureFixture,
):
    with pytest.raises(ValueError, match="first"):
        async with needed() as on_failure:
            async with OwnedTasks(on_failure) as tasks:
                tasks.start(fails(ValueError("first")), name="a")
                tasks.start(fails(ValueError("second")), name="b")
                await forever()
    async with OwnedTasks(on_failure) as tasks:  # it is not needed any more
        tasks.start(fails(ValueError("late")), name="c")
        await asyncio.sleep(1)
    logged = [record.getMessage() for record in caplog.records]
    assert logged == ["task a failed", "task b failed", "task c failed"]


@virtual
async def test_a_cancel_of_the_body_s_owner_is_not_replaced_by_a_failure():
    async def owner() -> None:
        async with needed() as on_failure:
            async with OwnedTasks(on_failure) as tasks:
                tasks.start(fails(ValueError("lost")), name="a")
                try:
                    await forever()
                finally:
                    await asyncio.sleep(2)

    task = asyncio.create_task(owner())
    await asyncio.sleep(1)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


# Waits for the first of several: the others end, and no failure is silent


async def after(seconds: float, exc: Exception | None = None) -> None:
    await asyncio.sleep(seconds)
    if exc is not None:
        raise exc


async def fails_on_its_way_out() -> None:
    try:
        await forever()
    finally:
        raise ValueError("on its way out")


@pytest.mark.parametrize(("timeout_s", "waited_s"), [(None, 2.0), (5.0, 2.0), (0.5, 0.5)])
@virtual
async def test_it_waits_for_the_first_and_ends_the_others(timeout_s: float | None, waited_s: float):
    began = loop_time()
    await first_of(after(2.0), after(3.0), forever(), timeout_s=timeout_s)
    assert loop_time() == began + waited_s
    assert asyncio.all_tasks() == {asyncio.current_task()}


@virtual
async def test_the_failure_of_one_is_raised():
    with pytest.raises(ValueError, match="early"):
        await first_of(after(2.0), after(1.0, ValueError("early")))
    with pytest.raises(ValueError, match="on its way out"):
        await first_of(after(1.0), fails_on_its_way_out())
    with pytest.raises(ValueError, match="one"):
        await first_of(after(1.0, ValueError("one")), after(1.0, ValueError("two")))
    assert asyncio.all_tasks() == {asyncio.current_task()}


@virtual
async def test_a_cancel_ends_all():
    waiting = asyncio.create_task(first_of(after(2.0), fails_on_its_way_out()))
    await asyncio.sleep(1.0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert asyncio.all_tasks() == {asyncio.current_task()}
