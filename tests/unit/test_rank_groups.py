"""Prefill and decode engines of several ranks each: who writes, who waits for whom."""

import asyncio
import itertools
import math
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest

from dynamo_lite.disagg.decode.rank import DecodeRank
from dynamo_lite.disagg.messages import (
    NOT_HELD,
    BlockWrite,
    DecodeStep,
    PrefillStep,
    RankResults,
    WorkerReport,
)
from dynamo_lite.disagg.metrics import BYTES, MISMATCH
from dynamo_lite.disagg.prefill.rank import PrefillRank
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.prefill import decode_written
from dynamo_lite.runtime.claim_cells import Until
from tests.builders import ManualClock, always_held, block_write, engine_metadata, expecting
from tests.shards import Shape, ShardedEngine, expected
from tests.twins.mover import MemoryFabric, MemoryMover
from tests.unit.decode_engine import BLOCK, TIMEOUT_S, prompt
from tests.unit.decode_engine import Decode as Engine

BLOCKS = 8
LOCAL, REMOTE = [5, 1, 2], [0, 1, 6]
SIZES = [(tensor, pipeline) for tensor in (1, 2, 4) for pipeline in (1, 2)]


class Posing:
    """A mover whose commits say something else."""

    def __init__(self, mover: MemoryMover, **said: int):
        self._mover, self._said = mover, said

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mover, name)

    def write(self, peer, local, remote, *, memory, notice):
        if (commit := decode_written(notice)).last:
            notice = encode(msgspec.structs.replace(commit, **self._said))
        return self._mover.write(peer, local, remote, memory=memory, notice=notice)


class Group:
    """An engine's memory and agents. name: its engine id."""

    def __init__(self, fabric, name: str, shape: Shape, heads: int, *, truth: bool):
        count = shape.tensor * shape.pipeline
        self.name = name
        self.movers = [MemoryMover(fabric, f"{name}-{rank}") for rank in range(count)]
        self.engine = ShardedEngine(shape, heads, BLOCKS, dict(enumerate(self.movers)), truth=truth)
        self.own = self.engine.ranks

    def metadata(self) -> bytes:
        ranks = tuple(self.own)
        return encode(
            engine_metadata(self.name, block_size_tokens=8, num_blocks=BLOCKS, ranks=ranks)
        )


class Prefill(Group):
    def __init__(self, fabric, shape: Shape, heads: int = 4, until: Until = always_held):
        super().__init__(fabric, "p", shape, heads, truth=True)
        self.ranks = [
            PrefillRank(mover, own, rank, until)
            for rank, (mover, own) in enumerate(zip(self.movers, self.own, strict=True))
        ]

    def poses(self, rank: int, **said: int) -> None:
        """This rank says something else in its commits."""
        posing: Any = Posing(self.movers[rank], **said)
        self.ranks[rank] = PrefillRank(posing, self.own[rank], rank, always_held)

    def write(self, target: bytes, attempt: str = "a1", ranks: list[int] | None = None) -> None:
        """The same steps for every rank (or only some), as the engine's scheduler gives them."""
        own = self.metadata() if len(self.ranks) > 1 else b""
        for rank in range(len(self.ranks)) if ranks is None else ranks:
            first = blocks(attempt, LOCAL[:1], REMOTE[:1], first=0)
            step = PrefillStep(writes=[first], targets={"d": target}, own=own)
            self.ranks[rank].step(step, lambda: True)
            rest = blocks(attempt, LOCAL[1:], REMOTE[1:], first=1, last=True)
            ended = [(attempt, True)]
            self.ranks[rank].step(PrefillStep(writes=[rest], ended=ended), lambda: True)

    def ended(self, ranks: list[int] | None = None) -> tuple[list[set[str]], dict[str, str]]:
        sent, failures = [], {}
        for rank in self.ranks if ranks is None else [self.ranks[i] for i in ranks]:
            sent.append(rank.results().sent)
            report = rank.report()
            failures.update(report.failures if report else {})
        return sent, failures


class Decode(Group):
    def __init__(self, fabric, shape: Shape, heads: int = 4):
        super().__init__(fabric, "d", shape, heads, truth=False)
        self.ranks = [
            DecodeRank(mover, own) for mover, own in zip(self.movers, self.own, strict=True)
        ]

    def expect(self, attempt: str = "a1") -> None:
        step = expecting({attempt: f"r-{attempt}"}, blocks={attempt: tuple(REMOTE)})
        assert self.settle(step) == [(set(), set())] * len(self.ranks)

    def settle(self, step: DecodeStep | None = None) -> list[tuple[set[str], set[str]]]:
        """One engine step: (received, lost) by rank."""
        for rank in self.ranks:
            rank.step(step or DecodeStep(poll=True))
        results = [rank.results() for rank in self.ranks]
        return [(result.received, result.lost) for result in results]

    def check(self) -> None:
        for shard in [shard for rank in self.engine.shards for shard in rank]:
            np.testing.assert_array_equal(shard.blocks, expected(shard, LOCAL, REMOTE))

    def commits(self, rank: int) -> list:
        said = [decode_written(notice) for notice in self.movers[rank].inbox]
        return [written for written in said if written.last]


def blocks(attempt: str, local, remote, *, first: int, last: bool = False) -> BlockWrite:
    counts = {"num_blocks": len(REMOTE), "first": first}
    return block_write(attempt, list(local), list(remote), target_engine="d", last=last, **counts)


def pair(prefill: Shape, decode: Shape, heads: int = 4) -> tuple[Prefill, Decode]:
    fabric = MemoryFabric()
    return Prefill(fabric, prefill, heads), Decode(fabric, decode, heads)


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("there", SIZES, ids=str)
@pytest.mark.parametrize("here", SIZES, ids=str)
def test_all_ranks_receive_what_one_would_have(here, there, heads):
    prefill, decode = pair(Shape(*here), Shape(*there), heads)
    decode.expect()
    prefill.write(decode.metadata())
    sent, failures = prefill.ended()
    assert (sent, failures) == ([{"a1"}] * len(prefill.ranks), {})
    assert decode.settle() == [({"r-a1"}, set())] * len(decode.ranks)
    decode.check()
    moved = sum(rank.stats.take().get(BYTES, 0) for rank in prefill.ranks)
    per_block = sum(region.block_bytes for own in decode.own for region in own.regions)
    assert moved == per_block * len(REMOTE), "each byte once"


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_commit_that_does_not_fit_is_reported_only_when_no_rank_writes_any_more(wrong, caplog):
    prefill, decode = pair(Shape(tensor=2), Shape())
    decode.expect()
    prefill.poses(wrong, num_blocks=2)
    prefill.write(decode.metadata(), ranks=[0])
    assert decode.settle() == [(set(), set())]
    prefill.write(decode.metadata(), ranks=[1])
    assert decode.settle() == [(set(), {"r-a1"})]
    assert decode.ranks[0].stats.take()[MISMATCH] == 1
    assert f"rank {wrong}: 2 blocks, not 3" in caplog.text


def test_a_share_that_no_rank_brought_is_missed(caplog):
    """Both writers speak for the same heads."""
    prefill, decode = pair(Shape(tensor=2), Shape())
    decode.expect()
    posing: Any = Posing(prefill.movers[0], rank=7)
    prefill.ranks[1] = PrefillRank(posing, prefill.own[0], 0, always_held)
    prefill.write(decode.metadata())
    assert decode.settle() == [(set(), {"r-a1"})]
    assert "layer 0: bytes" in caplog.text


@pytest.mark.parametrize("looks", [0, 1, 2, 3, 4])
def test_a_cell_that_shuts_between_two_ranks_of_a_write_stops_the_second(looks):
    """It is looked at before each of them."""
    fabric, seen = MemoryFabric(), itertools.count()
    prefill = Prefill(fabric, Shape(), until=lambda _: math.inf if next(seen) < looks else 0.0)
    decode = Decode(fabric, Shape(tensor=2))
    decode.expect()
    prefill.write(decode.metadata())
    assert prefill.ended() == ([{"a1"}], {"a1": NOT_HELD})
    written = [any(shard.blocks.any() for shard in rank) for rank in decode.engine.shards]
    # One look for the write, and one for each rank; the next write has its own.
    assert written == [looks > 1, looks > 2]
    assert decode.settle() == [(set(), set())] * 2


# What of a lost attempt enters the prefix cache


class Lost:
    """An attempt that several ranks write, each its heads, into as many; one block per write.

    written: how many blocks each rank has brought; the last one commits. misfit: a rank whose
    commit does not fit.
    """

    def __init__(self, ranks: int, misfit: int | None = None):
        self.prefill, self.decode = pair(Shape(tensor=ranks), Shape(tensor=ranks), heads=12)
        if misfit is not None:
            self.prefill.poses(misfit, num_blocks=2)
        self.decode.expect()
        self.target, self.own = self.decode.metadata(), self.prefill.metadata()
        self.written = [0] * ranks
        self.reports: list[list[WorkerReport | None]] = []
        self.cached: list[int] = []

    def write(self, rank: int) -> None:
        at = self.written[rank]
        self.written[rank] += 1
        last = self.written[rank] == len(REMOTE)
        write = blocks("a1", LOCAL[at : at + 1], REMOTE[at : at + 1], first=at, last=last)
        ended = [("a1", True)] if last else []
        step = PrefillStep(writes=[write], targets={"d": self.target}, own=self.own, ended=ended)
        self.prefill.ranks[rank].step(step, lambda: True)

    def step(self, *give_up: tuple[str, str]) -> None:
        self.decode.settle(DecodeStep(poll=True, give_up=list(give_up)))
        self.reports.append([rank.report() for rank in self.decode.ranks])

    def cached_blocks(self, *, last_first: bool = False) -> int:
        """The blocks that the scheduler half gives to the prefix cache, however late the
        messages arrive."""
        tokens: list[int] = []
        engine = Engine(ManualClock(), cache=lambda _, upto: tokens.append(upto))
        asyncio.run(self._give_up(engine))
        for report in itertools.chain(*(self.reports[::-1] if last_first else self.reports)):
            if report is not None:
                engine.half.worker_output(RankResults(), report)
        engine.half.worker_output(RankResults(lost={"r-a1"}))
        return tokens[0] // BLOCK if tokens else 0

    async def _give_up(self, engine: Engine) -> None:
        assert engine.admit(prompt("r-a1", BLOCK * len(REMOTE) + 1)) > 0
        await engine.step()
        engine.pass_s(TIMEOUT_S)
        await engine.network()
        assert engine.half.build_step().give_up


@pytest.mark.parametrize("seed", range(200))
def test_what_is_cached_of_a_lost_attempt_lies_right_on_all_ranks(seed):
    rng = Random(seed)
    ranks = range(rng.choice((2, 3, 4)))
    lost = Lost(len(ranks), rng.choice((None, None, *ranks)))
    for _ in range(rng.randrange(3 * len(ranks) + 4)):
        rank = rng.choice(ranks)
        if lost.written[rank] < len(REMOTE):
            lost.write(rank)
        if rng.random() < 0.3:
            lost.step()
    lost.step(("a1", "r-a1"))
    cached = lost.cached_blocks(last_first=rng.random() < 0.5)
    assert cached <= min(lost.written)
    wrong = [
        (rank, position)
        for rank in ranks
        for position in range(cached)
        for shard in lost.decode.engine.shards[rank]
        if not np.array_equal(
            shard.blocks[REMOTE[position]], expected(shard, LOCAL, REMOTE)[REMOTE[position]]
        )
    ]
    assert wrong == []
