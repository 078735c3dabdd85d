"""The order in which the storm of a Forwarder kills, and that it kills, with engines that only
count."""

import asyncio
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from tests.chaos import forward_storm
from tests.chaos.forward_storm import KILLS, ForwardStorm, Kill, Turns
from tests.vllm.stock import Role

ROLES: tuple[Role, ...] = ("prefill", "decode")


def names(role: Role) -> list[str]:
    return [kill.name for kill in KILLS if kill.role == role]


def due(turns: Turns, role: Role) -> Kill:
    kill = turns.next(role)
    assert kill is not None
    return kill


def done(turns: Turns, role: Role) -> str:
    kill = due(turns, role)
    turns.counts[kill.name] += 1
    return kill.name


def test_each_role_goes_through_its_kills_in_order():
    turns = Turns()
    for role in ROLES:
        assert [done(turns, role) for _ in names(role)] == names(role)
    assert set(turns.counts.values()) == {1}


def test_a_role_that_is_through_waits_until_the_other_one_is():
    turns = Turns()
    for _ in names("decode"):
        done(turns, "decode")
    assert turns.next("decode") is None
    for _ in names("prefill"):
        assert turns.next("decode") is None
        done(turns, "prefill")
    assert done(turns, "decode") == names("decode")[0]


def test_a_missed_kill_is_tried_again_after_the_others_and_before_the_next_round():
    turns = Turns()
    turns.missed(due(turns, "prefill"))
    first, *others = names("prefill")
    assert [done(turns, "prefill") for _ in names("prefill")] == [*others, first]


def test_a_moment_that_never_comes_does_not_hold_up_the_others():
    turns = Turns()
    never, *others = names("prefill")
    found: list[str] = []
    for _ in range(3 * len(others)):
        kill = due(turns, "prefill")
        if kill.name == never:
            turns.missed(kill)
        else:
            found.append(done(turns, "prefill"))
    assert found == others


def test_every_kill_of_the_role_of_the_documentation_is_planned():
    moments = {(kill.role, kill.moment) for kill in KILLS if not (kill.core or kill.all)}
    assert moments == {
        *(("prefill", moment) for moment in ("begins", "runs", "ends")),
        *(("decode", moment) for moment in ("begins", "runs")),
    }


class Engine:
    """Counts what is done to it."""

    def __init__(self, role: Role, done: list[str]):
        self.role, self.url, self._done = role, f"http://{role}", done

    def kill(self) -> None:
        self._done.append(f"kill {self.role}")

    def kill_core(self) -> None:
        self._done.append(f"kill core of {self.role}")

    def end(self) -> None:
        pass

    def start(self) -> None:
        self._done.append(f"start {self.role}")


class Engines:
    """In place of a `StockCluster`: every moment comes at once, except `never`."""

    def __init__(self, never: str = ""):
        self.done: list[str] = []
        self.kills: list[float] = []
        prefill = [Engine("prefill", self.done) for _ in range(2)]
        decode = [Engine("decode", self.done) for _ in range(2)]
        self.running = SimpleNamespace(prefill=prefill, decode=decode)
        self._never = never

    async def when(self, engine: Engine, moment: str, within_s: float) -> bool:
        return moment != self._never

    async def back(self, engine: Engine, within_s: float) -> None:
        pass


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_storm, "_PAUSE_S", (0.0, 0.0))
    monkeypatch.setattr(forward_storm, "_DOWN_S", 0.0)


async def raging(engines: Engines, until: Callable[[Counter[str]], bool]) -> Counter[str]:
    """The kills of a storm that is stopped as soon as they are enough."""
    storm = ForwardStorm(engines, seed=1, say=lambda _: None)  # type: ignore[arg-type]
    raging = asyncio.create_task(storm.rage())
    async with asyncio.timeout(20):
        while not until(storm.turns.counts):
            await asyncio.sleep(0.001)
        storm.stop()
        await raging
    assert storm.trouble == []
    return storm.turns.counts


async def test_a_storm_does_every_kill_and_starts_what_it_has_killed():
    engines = Engines()
    counts = await raging(engines, lambda counts: min(counts.values()) == 2)
    assert max(counts.values()) <= 3
    done = Counter(engines.done)
    for role in ROLES:
        # The kill of all engines is of two.
        every = sum(
            counts[kill.name] * (2 if kill.all else 1) for kill in KILLS if kill.role == role
        )
        core = sum(counts[kill.name] for kill in KILLS if kill.role == role and kill.core)
        assert (done[f"kill {role}"], done[f"kill core of {role}"]) == (every - core, core)
        assert done[f"start {role}"] == every
    decode = sum(counts[kill.name] for kill in KILLS if kill.role == "decode")
    assert len(engines.kills) == decode


async def test_a_storm_goes_on_with_the_other_kills_where_one_is_not_possible():
    others = {kill.name for kill in KILLS if kill.moment != "ends"}
    counts = await raging(
        Engines(never="ends"), lambda counts: all(counts[name] for name in others)
    )
    assert counts["prefill: when a leg has ended"] == 0
    assert all(counts[name] == 1 for name in others)
