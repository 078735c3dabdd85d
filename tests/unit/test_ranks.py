"""The two worker halves against each other, over the mover's in-process twin."""

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dynamo_lite.disagg.counters import DROPPED
from dynamo_lite.disagg.decode.rank import DecodeRank
from dynamo_lite.disagg.messages import (
    NOT_HELD,
    BlockWrite,
    DecodeStep,
    PrefillStep,
    WorkerReport,
)
from dynamo_lite.disagg.metrics import BYTES, DESCRIPTORS, LATE, SECONDS, STOPPED
from dynamo_lite.disagg.prefill import remote_ranks
from dynamo_lite.disagg.prefill.rank import PrefillRank
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.errors import TransferError
from dynamo_lite.protocol.prefill import Written
from dynamo_lite.protocol.records import EngineMetadata, KvRegion, RankMetadata
from dynamo_lite.runtime.claim_cells import Cell, ClaimCells, OpenCell
from dynamo_lite.runtime.clock import Clock
from dynamo_lite.transfer.nixl import NixlMover
from tests.builders import CLAIM, HELD, block_write, engine_metadata, expecting
from tests.twins.mover import MemoryFabric, MemoryMover, MemoryTransfer

BLOCKS, BLOCK_BYTES, WAIT_S = 32, 64, 20.0
#: For how long writes go on after the end of their claim.
MOVE_S = 6.0


class Memory:
    """One rank's pool of one layer."""

    def __init__(self, mover: MemoryMover, fill: Callable[[int], int], layer: str = "0"):
        self.blocks = np.array([[fill(i)] * BLOCK_BYTES for i in range(BLOCKS)], np.uint8)
        base = self.blocks.__array_interface__["data"][0]
        mover.register([(base, self.blocks.nbytes)], "DRAM", 0)
        region = KvRegion(layer=layer, base=base, stride_bytes=BLOCK_BYTES, block_bytes=BLOCK_BYTES)
        self.rank = RankMetadata(agent=mover.metadata(), memory="DRAM", device=0, regions=(region,))

    def written(self) -> dict[int, int]:
        """Block -> what it holds, where that is not the initial zero."""
        return {i: int(row[0]) for i, row in enumerate(self.blocks) if row.any()}


class Unchecked(DecodeRank):
    """Takes each commit for what it says."""

    def _finish(self, attempt: str, awaited: Any) -> None:
        self._received.add(awaited.request_id)


class Decode:
    """A decode engine of one rank, all zeros."""

    def __init__(
        self, fabric: MemoryFabric, engine_id: str, layer: str = "0", *, checks: bool = False
    ):
        self.engine_id = engine_id
        self.mover = MemoryMover(fabric, f"decode-{engine_id}")
        self.memory = Memory(self.mover, lambda _: 0, layer)
        self.rank = (DecodeRank if checks else Unchecked)(self.mover, self.memory.rank)

    def known(self, ranks: int = 1) -> EngineMetadata:
        """As others know it."""
        own = (self.memory.rank,) * ranks
        return engine_metadata(self.engine_id, num_blocks=BLOCKS, ranks=own)

    def metadata(self, ranks: int = 1) -> bytes:
        return encode(self.known(ranks))

    def settle(self, **step) -> tuple[set[str], set[str]]:
        """One engine step: (received, failed)."""
        if "claims" in step:
            self.rank.step(DecodeStep(poll=True, **step))
        else:
            self.rank.step(expecting(**{"expect": {}, "poll": True, **step}))
        results = self.rank.results()
        return results.received, results.lost


class Prefill:
    """A prefill engine of one rank; block i is filled with 100 + i. broken: the links that broke in
    the last step, with the reasons."""

    def __init__(
        self, fabric: MemoryFabric, rank: int = 0, *, monotonic: Callable[[], float] | None = None
    ):
        self.mover = MemoryMover(fabric, f"prefill-{rank}")
        self.memory = Memory(self.mover, lambda i: 100 + i)
        self.broken = dict[str, str]()
        self.cells = ClaimCells(8)
        self.now = 5000.0
        #: Until when the claim holds that a write is made under unless it names another one.
        self.held_until = math.inf
        clock = Clock(boottime=lambda: self.now)
        self.rank = PrefillRank(
            self.mover,
            self.memory.rank,
            rank,
            lambda cell: self.held_until if cell == HELD else self.cells.read(cell),
            replace(clock, monotonic=monotonic) if monotonic else clock,
            move_s=MOVE_S,
        )

    def claim(self, claim: int = 1, for_s: float = 0.0) -> OpenCell:
        opened = self.cells.open(claim)
        opened.hold_until(self.now + for_s if for_s else 0.0)
        return opened

    def step(self, *writes: BlockWrite, ready: Callable[[], bool] = lambda: True, **step) -> None:
        self.rank.step(PrefillStep(writes=list(writes), **step), ready)

    def ended(self) -> tuple[set[str], dict[str, str]]:
        """One engine step: (requests whose writes have ended, failures by request)."""
        sent = self.rank.results().sent
        report = self.rank.report() or WorkerReport()
        self.broken = report.broken
        return sent, report.failures


@pytest.fixture
def fabric() -> MemoryFabric:
    return MemoryFabric()


@pytest.fixture
def decode(fabric) -> Decode:
    return Decode(fabric, "e1")


@pytest.fixture
def prefill(fabric) -> Prefill:
    return Prefill(fabric)


def blocks(
    local: list[int],
    remote: list[int],
    *,
    attempt: str = "a1",
    last: bool = False,
    engine: str = "e1",
    num_blocks: int = 4,
    first: int = 0,
    cell: Cell = HELD,
) -> BlockWrite:
    return block_write(
        attempt,
        local,
        remote,
        target_engine=engine,
        last=last,
        num_blocks=num_blocks,
        first=first,
        cell=cell,
    )


def targets(*engines: Decode) -> dict[str, bytes]:
    return {engine.engine_id: engine.metadata() for engine in engines}


def commit(attempt: str, num_blocks: int = 4, rank: int = 0) -> Written:
    return Written(attempt=attempt, claim=CLAIM, rank=rank, num_blocks=num_blocks, last=True)


def notice(attempt: str) -> bytes:
    return encode(commit(attempt))


# Writing


def test_blocks_stream_as_they_complete_and_the_last_one_commits(prefill, decode):
    assert decode.settle(expect={"a1": "r1"}) == (set(), set())
    prefill.step(blocks([3, 4], [10, 11]), targets=targets(decode))
    assert decode.memory.written() == {10: 103, 11: 104}
    assert decode.settle() == (set(), set())
    prefill.step(blocks([7], [20], last=True))
    assert decode.memory.written() == {10: 103, 11: 104, 20: 107}
    assert decode.settle() == ({"r1"}, set())
    assert decode.settle() == (set(), set()) and decode.rank.report() is None
    assert prefill.ended() == (set(), {})
    prefill.step(ended=[("a1", True)])
    assert prefill.ended() == ({"a1"}, {})
    assert prefill.ended() == (set(), {})


def test_what_was_written_is_counted(prefill, decode):
    prefill.step(blocks([3, 4, 6], [10, 11, 12], last=True), targets=targets(decode))
    taken = prefill.rank.stats.take()
    assert taken[BYTES] == 3 * BLOCK_BYTES
    assert taken[DESCRIPTORS] == 2
    assert len(taken[SECONDS]) == 1


def test_the_last_write_waits_for_all_earlier_ones(prefill, decode):
    prefill.mover.hold = True
    prefill.step(blocks([1], [1]), targets=targets(decode))
    prefill.step(blocks([2], [2]))
    prefill.step(blocks([3], [3], last=True), ended=[("a1", True)])
    assert len(prefill.mover.transfers) == 2
    prefill.mover.let_go(1)
    assert prefill.ended() == (set(), {})
    assert len(prefill.mover.transfers) == 2
    prefill.mover.let_go()
    assert prefill.ended() == (set(), {})
    assert len(prefill.mover.transfers) == 3
    assert decode.settle(expect={"a1": "r1"}) == (set(), set())
    prefill.mover.let_go()
    assert prefill.ended() == ({"a1"}, {})
    assert decode.settle() == ({"r1"}, set())
    assert decode.memory.written() == {1: 101, 2: 102, 3: 103}


def test_progress_is_driven_while_anything_is_open(prefill, decode):
    prefill.ended()
    assert prefill.mover.polls == 0
    prefill.step(blocks([1], [1]), targets=targets(decode))
    prefill.ended()
    assert prefill.mover.polls == 1


# Failing


@pytest.mark.parametrize(
    "wire", [MemoryMover, lambda _, name: NixlMover(name)], ids=["twin", "NIXL"]
)
def test_a_failed_attempt_ends_only_when_its_other_writes_have(monkeypatch, fabric, wire):
    """Nor does another's: without the agent, they would fail at once and land later."""
    monkeypatch.setenv("UCX_TLS", "tcp")  # its first contact needs the target's polls
    monkeypatch.setattr("tests.unit.test_ranks.MemoryMover", wire)
    prefill, decode = Prefill(fabric), Decode(fabric, "e1")
    prefill.mover.hold = True
    writes = blocks([1], [1]), blocks([2], [2]), blocks([3], [3], attempt="a2")
    prefill.step(*writes, targets=targets(decode))

    def lost() -> bool:
        raise TransferError("e1/0", "lost")

    prefill.rank._attempts["a1"].in_flight[0].write.done = lost
    prefill.step(ended=[("a1", False), ("a2", False)])
    assert prefill.ended() == (set(), {})
    assert list(prefill.broken) == ["e1"], "that does not wait for them"
    prefill.step(blocks([4], [4], attempt="a3"), ended=[("a3", False)])
    sent, failures = prefill.ended()
    assert (sent, list(failures), prefill.broken) == ({"a3"}, ["a3"], {})
    getattr(prefill.mover, "let_go", list)()
    ended, deadline = dict[str, str | None](), time.monotonic() + WAIT_S
    while len(ended) < 2:
        assert time.monotonic() < deadline and not prefill.broken
        decode.settle()
        sent, failures = prefill.ended()
        ended |= {request: failures.get(request) for request in sent}
    assert ended["a1"] is not None and ended["a2"] is None
    assert decode.memory.written().items() >= {2: 102, 3: 103}.items()
    prefill.rank.close()
    decode.mover.close()


def test_a_failed_peer_fails_its_other_attempts_and_is_met_again(prefill, decode):
    """What waits for the same peer must neither be written nor end the engine's step. The next job
    brings its metadata."""
    prefill.mover.hold = True
    prefill.step(blocks([1], [1]), blocks([2], [2], attempt="a2"), targets=targets(decode))
    prefill.step(blocks([3], [3], attempt="a2", last=True))
    prefill.mover.transfers[0].failure = "lost"
    prefill.mover.let_go()
    prefill.step(ended=[("a1", True), ("a2", True)])
    sent, failures = prefill.ended()
    assert (sent, sorted(failures)) == ({"a1", "a2"}, ["a1", "a2"])
    assert prefill.broken == {"e1": "e1/0: lost"}, "the other's failure follows from it"
    prefill.mover.hold = False
    last = blocks([4], [4], attempt="a3", last=True)
    prefill.step(last, targets=targets(decode), ended=[("a3", True)])
    assert prefill.ended() == ({"a3"}, {})
    assert decode.settle(expect={"a3": "r3"}) == ({"r3"}, set())


def bad_targets(fabric) -> dict[str, dict[str, bytes]]:
    stranger, odd = Decode(fabric, "gone"), Decode(fabric, "odd", layer="other")
    stranger.rank.close()
    return {
        "garbage": {"e1": b"\xc1"},
        "another message": {"e1": encode(commit("a"))},
        "no such rank": {"e1": Decode(fabric, "e1").metadata(ranks=0)},
        "dead": {"e1": stranger.metadata()},
        "other layout": {"e1": odd.metadata()},
    }


@pytest.mark.parametrize("why", list(bad_targets(MemoryFabric())))
def test_a_peer_that_cannot_be_used_fails_the_attempt_not_the_engine(prefill, fabric, why):
    prefill.step(blocks([1], [1]), targets=bad_targets(fabric)[why])
    prefill.step(blocks([2], [2], last=True), ended=[("a1", True)])
    assert prefill.mover.transfers == []
    sent, failures = prefill.ended()
    assert sent == {"a1"}
    assert list(prefill.broken) == ["e1"]
    assert failures["a1"] == f"KV transfer with engine e1: not usable: {prefill.broken['e1']}"
    good = Decode(fabric, "e1")
    prefill.step(
        blocks([1], [1], attempt="a2", last=True),
        targets=targets(good),
        ended=[("a2", True)],
    )
    assert prefill.ended() == ({"a2"}, {})


@pytest.mark.parametrize("local", [[1], [1, 2, 3], [BLOCKS, BLOCKS + 1]])
def test_blocks_that_do_not_pair_up_fail_the_attempt(prefill, decode, local):
    prefill.step(blocks(local, [1, 2], last=True), targets=targets(decode), ended=[("a1", True)])
    sent, failures = prefill.ended()
    assert (sent, list(failures)) == ({"a1"}, ["a1"])
    if len(local) != 2:  # else NIXL refuses the write
        assert prefill.broken == {}, "another job may be written"
    assert decode.memory.written() == {}


# The end of a claim


@pytest.mark.parametrize("how", ["refused", "run out"])
def test_a_cell_that_shuts_between_two_writes_stops_the_second(prefill, decode, how):
    opened = prefill.claim(for_s=3.0)
    prefill.step(blocks([1], [1], cell=opened.cell), targets=targets(decode))
    if how == "refused":
        opened.hold_until(0.0)
    else:
        prefill.now += 3.0
    prefill.step(blocks([2], [2], cell=opened.cell))
    # It does not go on where it stopped, should the claim be renewed after all.
    opened.hold_until(prefill.now + 3.0)
    prefill.step(blocks([3], [3], last=True, cell=opened.cell), ended=[("a1", True)])
    assert decode.memory.written() == {1: 101}
    assert prefill.ended() == ({"a1"}, {"a1": NOT_HELD}) and prefill.broken == {}
    assert prefill.rank.stats.take()[STOPPED] == 1
    assert decode.settle(expect={"a1": "r1"}) == (set(), set())


def test_the_cell_is_looked_at_when_a_write_starts_not_when_it_is_asked_for(prefill, decode):
    computed: list[bool] = []
    opened = prefill.claim(for_s=3.0)
    prefill.step(blocks([1], [1], cell=opened.cell), targets=targets(decode))
    prefill.step(
        blocks([2], [2], last=True, cell=opened.cell),
        ready=lambda: bool(computed),
        ended=[("a1", True)],
    )
    prefill.now += 3.0
    computed.append(True)
    assert prefill.ended() == ({"a1"}, {"a1": NOT_HELD})
    assert decode.memory.written() == {1: 101}


def test_a_write_in_flight_goes_on_for_a_while_after_its_claim(prefill, decode):
    prefill.mover.hold = True
    opened = prefill.claim(for_s=3.0)
    prefill.step(blocks([1], [1], cell=opened.cell), targets=targets(decode))
    opened.hold_until(0.0)
    prefill.now += 3.0 + MOVE_S - 0.01
    prefill.step(ended=[("a1", False)])
    assert prefill.ended() == (set(), {})
    prefill.mover.let_go()
    assert prefill.ended() == ({"a1"}, {})
    assert decode.memory.written() == {1: 101}
    prefill.now += 60.0
    assert prefill.ended() == (set(), {}), "nothing is in flight any more"


@pytest.mark.parametrize("call", ["results", "step", "preemption"])
def test_a_write_in_flight_beyond_that_is_not_moved_on_and_ends_the_engine(
    prefill, decode, fabric, call
):
    """The blocks may be another request's by then."""
    prefill.mover.hold = True
    opened = prefill.claim(for_s=3.0)
    prefill.step(
        blocks([1], [1], cell=opened.cell),
        # What else is in flight would move it, too.
        blocks([2], [2], attempt="a2"),
        targets=targets(decode),
    )
    prefill.mover.let_go()
    prefill.now += 3.0 + MOVE_S
    polls = prefill.mover.polls
    for _ in range(2):
        with pytest.raises(TransferError, match="6 s after the end of its claim"):
            if call == "results":
                prefill.rank.results()
            elif call == "step":
                prefill.step(blocks([3], [3], attempt="a3"))
            else:
                prefill.rank.drain_preempted(PrefillStep(preempted=["a2"]))
    assert decode.memory.written() == {} and prefill.mover.polls == polls
    assert len(prefill.mover.transfers) == 2
    prefill.rank.close()
    assert prefill.mover in fabric.agents.values(), "its agent stays until its process ends"


def test_a_renewal_moves_the_end_of_what_is_in_flight(prefill, decode):
    prefill.mover.hold = True
    opened = prefill.claim(for_s=3.0)
    prefill.step(blocks([1], [1], cell=opened.cell), targets=targets(decode))
    prefill.now += 2.0
    opened.hold_until(prefill.now + 3.0)
    prefill.now += 3.0 + MOVE_S - 0.01
    assert prefill.ended() == (set(), {})
    prefill.now += 0.01
    with pytest.raises(TransferError, match="after the end of its claim"):
        prefill.rank.results()


def test_an_abandoned_attempt_drops_what_waits_and_ends_with_what_flies(prefill, decode):
    prefill.mover.hold = True
    prefill.step(blocks([1], [1]), targets=targets(decode))
    prefill.step(blocks([2], [2], last=True))
    prefill.step(ended=[("a1", False)])
    assert prefill.ended() == (set(), {})
    prefill.mover.let_go()
    assert prefill.ended() == ({"a1"}, {})
    assert decode.memory.written() == {1: 101}
    assert decode.settle(expect={"a1": "r1"}) == (set(), set())


# Stopping


def test_preemption_waits_for_writes_that_read_the_blocks(prefill, decode):
    prefill.mover.hold = True
    prefill.step(blocks([1], [1]), targets=targets(decode))
    (flying,) = prefill.mover.transfers
    polls = iter(range(3))

    def done() -> bool:
        flying.held = next(polls, None) is not None
        return MemoryTransfer.done(flying)

    flying.done = done
    prefill.rank.drain_preempted(PrefillStep(preempted=["a1", "unknown"]))
    assert decode.memory.written() == {1: 101}
    assert next(polls, None) is None

    # It is computed again from its first block, in other blocks.
    prefill.mover.hold = False
    prefill.step(blocks([7], [1]))
    prefill.step(blocks([8], [2], last=True), ended=[("a1", True)])
    assert prefill.ended() == ({"a1"}, {})
    assert decode.memory.written() == {1: 107, 2: 108}
    assert decode.settle(expect={"a1": "r1"}) == ({"r1"}, set())


def test_a_commit_that_preemption_took_away_is_a_failure(prefill, decode):
    """The engine has scheduled the last chunk, and will not name its blocks again."""
    prefill.mover.hold = True
    prefill.step(blocks([1], [1]), blocks([2], [2], last=True), targets=targets(decode))
    prefill.mover.let_go()
    prefill.rank.drain_preempted(PrefillStep(preempted=["a1"]))
    prefill.step(ended=[("a1", True)])
    sent, failures = prefill.ended()
    assert sent == {"a1"}
    assert "preempted" in failures["a1"] and prefill.broken == {}
    assert decode.settle(expect={"a1": "r1"}) == (set(), set())


def test_a_write_that_outlasts_preemption_ends_the_engine(fabric, decode):
    ticks = itertools.count(1.0)
    prefill = Prefill(fabric, monotonic=lambda: next(ticks))
    prefill.mover.hold = True
    prefill.step(blocks([1], [1]), targets=targets(decode))
    with pytest.raises(TransferError, match="does not end"):
        prefill.rank.drain_preempted(PrefillStep(preempted=["a1"]))


def test_the_peers_that_were_used_last_stay_connected(prefill, fabric, monkeypatch):
    """Of the others those are forgotten to which nothing is written."""
    monkeypatch.setattr(remote_ranks, "_MOST_ENGINES", 2)
    engines = {name: Decode(fabric, name) for name in ("e1", "e2", "e3", "e4", "e5")}

    def meets(engine: str) -> list[str]:
        """Writes an attempt to it; the peers that are forgotten for it."""
        prefill.mover.removed.clear()
        write = blocks([1], [1], attempt=f"to-{engine}", last=True, engine=engine)
        prefill.step(write, targets=targets(engines[engine]))
        if not prefill.mover.hold:
            prefill.step(ended=[(f"to-{engine}", True)])
        prefill.ended()
        return list(prefill.mover.removed)

    assert [meets(engine) for engine in ("e1", "e2", "e1")] == [[], [], []]
    prefill.mover.hold = True
    assert meets("e3") == ["e2/0"]
    assert meets("e4") == ["e1/0"]
    assert meets("e5") == [], "the others are written to"
    prefill.mover.let_go()
    prefill.mover.hold = False
    prefill.step(ended=[(f"to-{engine}", True) for engine in ("e3", "e4", "e5")])
    assert prefill.ended() == ({"to-e3", "to-e4", "to-e5"}, {})
    assert sorted(meets("e5")) == ["e3/0"]


# Receiving


def test_an_idle_engine_is_not_polled(decode):
    decode.settle(poll=False)
    assert decode.mover.polls == 0
    decode.settle(poll=False, expect={"a1": "r1"})
    decode.settle(poll=False)
    assert decode.mover.polls == 2
    decode.mover.inbox.append(notice("a1"))
    decode.settle(poll=False)
    decode.settle(poll=False)
    assert decode.mover.polls == 3


def test_memory_of_strangers_and_of_the_given_up_is_bounded(decode):
    decode.rank = Unchecked(decode.mover, decode.memory.rank, max_early=3)
    decode.mover.inbox += [notice(f"s{i}") for i in range(5)]
    decode.settle()
    expected = {f"s{i}": f"r{i}" for i in range(5)}
    assert decode.settle(expect=expected) == ({"r2", "r3", "r4"}, set())
    assert decode.rank.stats.take()[LATE] == 5


# Whose notices count


NOTHING: tuple[set[str], set[str]] = set(), set()


def of_claim(claim: int, **fields) -> Written:
    usual = {"attempt": "a1", "rank": 0, "num_blocks": 0, "last": True}
    return Written(claim=claim, **(usual | fields))


def said(decode: Decode, *notices: Written, **step) -> tuple[set[str], set[str]]:
    """The engine step in which these arrive."""
    decode.mover.inbox += [encode(notice) for notice in notices]
    return decode.settle(**{"claims": {}, **step})


def unclaimed(decode: Decode) -> int:
    return decode.rank.stats.data.get(f"{DROPPED}/unclaimed", 0)


def test_a_commit_counts_under_the_claim_of_its_attempt_only(decode):
    assert said(decode, expect={"a1": "r1"}) == NOTHING
    assert said(decode, of_claim(0), of_claim(4)) == NOTHING
    assert said(decode, of_claim(6), claims={"a1": 5}) == NOTHING
    assert said(decode, of_claim(5)) == ({"r1"}, set())
    assert unclaimed(decode) == 3


@pytest.mark.parametrize("claims", [{}, {"a1": 0}])
def test_without_a_claim_nothing_counts(decode, claims):
    """0 stands for no claim, also if the step or a writer names it."""
    said(decode, expect={"a1": "r1"}, blocks={"a1": (1, 2)}, claims=claims)
    landed = of_claim(0, num_blocks=1, last=False)
    assert said(decode, landed, of_claim(0, num_blocks=2)) == NOTHING
    assert said(decode, give_up=[("a1", "r1")]) == (set(), {"r1"})
    report = decode.rank.report()
    assert report is not None and report.landed == {"r1": 0}


def test_a_commit_that_comes_before_its_claim_is_known_counts(decode):
    assert said(decode, of_claim(5)) == NOTHING
    assert said(decode, of_claim(5), expect={"a1": "r1"}) == NOTHING
    assert said(decode, claims={"a1": 5}) == ({"r1"}, set())
    assert unclaimed(decode) == 0


def test_commits_of_two_claims_do_not_complete_each_other(decode):
    said(decode, expect={"a1": "r1"}, claims={"a1": 6})
    assert said(decode, of_claim(5, writers=2)) == NOTHING
    assert said(decode, of_claim(6, writers=2, rank=1)) == NOTHING
    assert said(decode, of_claim(5, writers=2, rank=1)) == NOTHING
    assert said(decode, of_claim(6, writers=2)) == ({"r1"}, set())
    assert unclaimed(decode) == 2


def test_blocks_that_landed_under_another_claim_do_not_count(decode):
    said(decode, expect={"a1": "r1"}, blocks={"a1": (1, 2)}, claims={"a1": 5})
    stale = of_claim(4, first=0, num_blocks=1, last=False)
    assert said(decode, stale, give_up=[("a1", "r1")]) == (set(), {"r1"})
    report = decode.rank.report()
    assert report is not None and report.landed == {"r1": 0}
    assert unclaimed(decode) == 1


@pytest.mark.parametrize("claim", [100, 343, 344, 599])
def test_what_comes_before_a_claim_is_bounded(decode, claim):
    said(decode, expect={"a1": "r1"})
    said(decode, *(of_claim(100 + i) for i in range(500)))
    # The last 256 are known.
    known = claim >= 344
    assert said(decode, claims={"a1": claim}) == (({"r1"}, set()) if known else NOTHING)
    assert not known or unclaimed(decode) == 255


def test_what_comes_before_a_claim_is_not_pushed_out_by_another_attempts(decode):
    said(decode, of_claim(5), expect={"a1": "r1"})
    said(decode, *(of_claim(6, attempt=f"ended-{i % 9}") for i in range(3000)))
    assert said(decode, claims={"a1": 5}) == ({"r1"}, set())
