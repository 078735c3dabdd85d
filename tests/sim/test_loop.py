"""The loop in virtual time: order, time, processes that stop and die, and sameness of runs."""

import asyncio
import contextlib
import gc
import sys
import warnings
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

from tests.sim.interpreters import printed
from tests.simulation.loop.loop import START_S, SimulationStuck, VirtualLoop
from tests.simulation.loop.process import SimProcess
from tests.simulation.loop.trace import Trace

T = TypeVar("T")


def run(
    main: Callable[[VirtualLoop], Coroutine[Any, Any, T]],
    seed: int = 0,
    trace: Trace | None = None,
    *,
    failures: int = 0,
) -> T:
    with VirtualLoop(seed, trace=trace) as loop:
        result = loop.run_until_complete(main(loop))
        assert len(loop.failures) == failures, loop.failures
    return result


async def note_at(times: list[float], *delays_s: float) -> None:
    for delay_s in delays_s:
        await asyncio.sleep(delay_s)
        times.append(asyncio.get_running_loop().time() - START_S)


# Time


def test_an_hour_takes_no_time():
    times: list[float] = []
    run(lambda loop: note_at(times, 3600.0, 0.5))
    assert times == [3600.0, 3600.5]


def test_timers_fire_in_order_and_cancelled_ones_do_not():
    async def main(loop: VirtualLoop) -> list[int]:
        fired: list[int] = []
        for i in (3, 1, 2, 1):
            loop.call_later(i, fired.append, i)
        loop.call_later(2.5, fired.append, 99).cancel()
        for _ in range(1000):
            loop.call_later(1.5, fired.append, 99).cancel()
        await asyncio.sleep(5)
        return fired

    assert run(main) == [1, 1, 2, 3]


def test_asyncios_own_timeouts_count_virtual_time():
    async def main(loop: VirtualLoop) -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30):
                await asyncio.Event().wait()
        return loop.time() - START_S

    assert run(main) == 30


def test_nothing_left_to_happen_is_an_error_that_names_who_waits():
    async def main(loop: VirtualLoop) -> None:
        worker = loop.add_process("worker")
        worker.spawn(asyncio.Event().wait(), "wait for ever")
        await asyncio.Event().wait()

    with pytest.raises(SimulationStuck, match="worker#1: wait for ever"):
        run(main)


def test_a_busy_loop_is_an_error():
    async def main(loop: VirtualLoop) -> None:
        while True:
            await asyncio.sleep(0)

    with pytest.raises(SimulationStuck, match="time does not advance"):
        run(main)


def test_threads_are_not_needed():
    async def main(loop: VirtualLoop) -> int:
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)
        return await asyncio.to_thread(sum, (1, 2))

    assert run(main) == 3


def test_what_fails_unheard_is_noted():
    async def main(loop: VirtualLoop) -> None:
        loop.call_soon(lambda: 1 // 0)
        loop.add_process("p").spawn(asyncio.wait_for(asyncio.Event().wait(), 1), "late")
        await asyncio.sleep(2)
        assert "ZeroDivisionError" in loop.failures[0]
        assert "p#1 late" in loop.failures[1]

    run(main, failures=2)


# Processes


async def tick(process_name: str, ticks: list[tuple[str, float]]) -> None:
    loop = asyncio.get_running_loop()
    try:
        while True:
            await asyncio.sleep(1)
            ticks.append((process_name, loop.time() - START_S))
    finally:
        ticks.append((process_name, -1))


def test_a_paused_process_goes_on_where_it_was():
    async def main(loop: VirtualLoop) -> None:
        ticks: list[tuple[str, float]] = []
        process = loop.add_process("p")
        order: list[int] = []
        process.spawn(tick("p", ticks))
        for i in range(3):
            process.run(loop.call_later, 3 + 0.1 * i, order.append, i)
        await asyncio.sleep(2.5)
        process.pause()
        await asyncio.sleep(10)
        assert order == []
        assert ticks == [("p", 1), ("p", 2)]
        process.resume()
        await asyncio.sleep(0.1)
        assert order == [0, 1, 2]
        assert ticks[2:] == [("p", 12.5)]
        await asyncio.sleep(1)
        assert ticks[3:] == [("p", 13.5)]

    run(main)


def test_of_a_killed_process_nothing_runs_ever_again():
    async def main(loop: VirtualLoop) -> list[tuple[str, float]]:
        ticks: list[tuple[str, float]] = []
        process = loop.add_process("p")
        process.spawn(tick("p", ticks))
        process.spawn(tick("p", ticks)).cancel()
        await asyncio.sleep(1.5)
        assert [task.get_name() for task in process.tasks()] == ["task 2"]
        process.kill()
        process.run(loop.call_soon, ticks.append, ("p", -2))
        process.spawn(tick("p", ticks), "too late")
        assert {"task 2", "too late"} == {task.get_name() for task in process.tasks()}
        assert {task.get_name() for task in asyncio.all_tasks()} == {"task 1"}
        await asyncio.sleep(10)
        gc.collect()
        await asyncio.sleep(10)
        return list(ticks)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run(main) == [("p", 1)]


def test_killed_in_its_own_step_it_gets_to_the_end_of_that():
    async def main(loop: VirtualLoop) -> None:
        steps: list[str] = []
        process = loop.add_process("p")

        async def suicide() -> None:
            loop.call_soon(steps.append, "later")
            process.kill()
            steps.append("to the end")
            try:
                await asyncio.sleep(0)
            finally:
                steps.append("finally")

        process.spawn(suicide())
        await asyncio.sleep(1)
        assert steps == ["to the end"]
        assert not process.running

    run(main)


def test_a_process_may_be_stopped_and_continued_in_its_own_step():
    async def main(loop: VirtualLoop) -> None:
        steps: list[str] = []
        process = loop.add_process("p")

        async def hiccup() -> None:
            loop.call_soon(steps.append, "before")
            process.pause()
            process.resume()
            loop.call_soon(steps.append, "after")
            await asyncio.sleep(0)
            process.pause()
            loop.call_soon(steps.append, "not yet")

        process.spawn(hiccup())
        await asyncio.sleep(1)
        assert steps == ["before", "after"]
        process.resume()
        await asyncio.sleep(1)
        assert steps == ["before", "after", "not yet"]

    run(main)


def test_an_incarnation_follows_the_one_that_died():
    async def main(loop: VirtualLoop) -> None:
        first = loop.add_process("p", host="h")
        with pytest.raises(ValueError, match="still there"):
            loop.add_process("p")
        first.kill()
        second = loop.add_process("p", host="h")
        assert (str(first), str(second)) == ("p#1", "p#2")
        assert loop.processes["p"] is second
        assert [await second.spawn(of_current(loop)), loop.current_process().name] == [
            second,
            "world",
        ]

    async def of_current(loop: VirtualLoop) -> SimProcess:
        return await asyncio.create_task(asyncio.sleep(1, loop.current_process()))

    run(main)


def test_tasks_that_a_process_leaves_behind_are_named():
    async def main(loop: VirtualLoop) -> None:
        process = loop.add_process("p")
        process.spawn(asyncio.sleep(10), "forgotten")
        await process.spawn(asyncio.sleep(1))
        assert process.exit() == ["forgotten"]
        assert loop.add_process("p").exit() == []

    run(main)


def test_a_hosts_wall_clock_jumps_and_no_other():
    async def main(loop: VirtualLoop) -> None:
        a, b = loop.add_process("a"), loop.add_process("b")
        together = a.clock.wall()
        assert b.clock.wall() == together
        loop.jump_wall("a", -100)
        await asyncio.sleep(5)
        assert a.clock.wall() == together - 95
        assert b.clock.wall() == together + 5
        assert a.clock.monotonic() == b.clock.monotonic() == START_S + 5

    run(main)


# Interleavings


def order_of(seed: int) -> list[str]:
    async def steps(name: str, seen: list[str]) -> None:
        for i in range(4):
            seen.append(f"{name}{i}")
            await asyncio.sleep(0)

    async def main(loop: VirtualLoop) -> list[str]:
        seen: list[str] = []
        tasks = [loop.add_process(name).spawn(steps(name, seen)) for name in "abc"]
        await asyncio.gather(*tasks)
        return seen

    return run(main, seed)


def test_a_seed_decides_who_is_first_but_not_within_a_process():
    orders = [order_of(seed) for seed in range(20)]
    assert len({tuple(order) for order in orders}) > 10
    for order in orders:
        for name in "abc":
            assert [step for step in order if step[0] == name] == [f"{name}{i}" for i in range(4)]
    assert orders == [order_of(seed) for seed in range(20)]


def busy_run(seed: int) -> tuple[str, str]:
    """Sets of tasks, timeouts, cancels and deaths; what came of it in two words."""

    async def work(loop: VirtualLoop, name: str) -> None:
        async with asyncio.TaskGroup() as group:
            tasks = {group.create_task(asyncio.sleep(loop.rng.random())) for _ in range(20)}
            await asyncio.sleep(0.5)
            for task in tasks:
                if task.cancel():
                    loop.trace.add(f"{name} cancelled {task.get_name()}")

    async def main(loop: VirtualLoop) -> tuple[str, str]:
        processes = [loop.add_process(f"p{i}") for i in range(5)]
        tasks = [process.spawn(work(loop, process.name)) for process in processes]
        await asyncio.sleep(0.4)
        processes[loop.rng.randrange(5)].kill()
        await asyncio.wait(tasks, timeout=5)
        return loop.fingerprint(), loop.trace.digest()

    return run(main, seed, Trace(on=True))


def test_equal_seeds_make_equal_runs_also_in_another_interpreter():
    expected = [busy_run(seed) for seed in range(3)]
    assert expected == [busy_run(seed) for seed in range(3)]
    assert len(set(expected)) == 3
    code = "from tests.sim.test_loop import busy_run; print([busy_run(seed) for seed in range(3)])"
    assert set(printed(code)) == {str(expected)}


def test_a_run_leaves_the_interpreter_as_it_was(capfd: pytest.CaptureFixture[str]):
    async def main(loop: VirtualLoop) -> None:
        process = loop.add_process("p")

        async def stubborn() -> None:
            while True:
                with contextlib.suppress(GeneratorExit):
                    await asyncio.sleep(1)

        process.spawn(stubborn())
        loop.add_process("q").spawn(tick("q", []))
        await asyncio.sleep(3)
        process.kill()

    hook = sys.unraisablehook
    run(main)
    assert gc.isenabled() and gc.get_freeze_count() == 0
    assert sys.unraisablehook is hook
    assert capfd.readouterr() == ("", "")


def test_what_the_end_of_a_run_closes_makes_no_loop():
    ended: list[str] = []

    async def main(loop: VirtualLoop) -> None:
        async def gathers_nothing() -> None:
            try:
                await asyncio.sleep(10)
            finally:
                await asyncio.gather()
                ended.append("gathered")

        loop.add_process("p").spawn(gathers_nothing())
        await asyncio.sleep(1)

    class NoLoop(asyncio.DefaultEventLoopPolicy):
        def new_event_loop(self) -> asyncio.AbstractEventLoop:
            raise AssertionError("a loop is made")

    before = asyncio.get_event_loop_policy()
    # As in a thread that had no loop before.
    asyncio.set_event_loop_policy(NoLoop())
    try:
        run(main)
    finally:
        asyncio.set_event_loop_policy(before)
    assert ended == ["gathered"]
