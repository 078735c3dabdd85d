"""Writes layer by layer while a step computes, over the mover's in-process twin."""

from typing import Any

import numpy as np
import pytest

from dynamo_lite.disagg.decode.rank import DecodeRank
from dynamo_lite.disagg.messages import BlockWrite, PrefillStep
from dynamo_lite.disagg.prefill.rank import PrefillRank
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.errors import TransferError
from dynamo_lite.runtime.permits import PermitVerdict
from dynamo_lite.simulation.engine.memory_mover import MemoryFabric, MemoryMover
from tests.builders import engine_metadata, expecting
from tests.shards import LAYERS, Shape, ShardedEngine, kv_of

BLOCKS, HEADS = 16, 4
NAMES = [str(layer) for layer in range(LAYERS)]


class Slow:
    """A write that ends when the wire lets it, and copies what lies there by then."""

    def __init__(self, wire: "Wire", inner: Any, notice: bytes):
        self.wire, self.inner, self.notice = wire, inner, notice
        self.over = False

    def done(self) -> bool:
        if self.wire.failure:
            raise TransferError("e1/0", self.wire.failure)
        self.over = self.over or (not self.wire.held and self.inner.done())
        return self.over


class Wire(MemoryMover):
    held = False
    failure = ""

    def __init__(self, fabric: MemoryFabric, name: str):
        super().__init__(fabric, name)
        self.started: list[Slow] = []

    def write(self, peer, local, remote, *, memory, notice=b"") -> Any:
        write = Slow(self, super().write(peer, local, remote, memory=memory, notice=notice), notice)
        self.started.append(write)
        return write

    @property
    def told(self) -> list[bool]:
        """For each write that was started, whether it carries a notification."""
        return [bool(write.notice) for write in self.started]


class Pair:
    """One prefill rank whose KV the test fills layer by layer, and the ranks of `decode`."""

    def __init__(self, decode: Shape):
        fabric = MemoryFabric()
        self.wire = Wire(fabric, "p")
        self.own = ShardedEngine(Shape(), HEADS, BLOCKS, {0: self.wire}, truth=False)
        movers = {i: MemoryMover(fabric, f"d{i}") for i in range(decode.tensor * decode.pipeline)}
        self.far = ShardedEngine(decode, HEADS, BLOCKS, movers, truth=False)
        self.halves = [DecodeRank(movers[i], rank) for i, rank in enumerate(self.far.ranks)]
        self.alive = True
        self.verdict = PermitVerdict.GRANTED
        self.rank = PrefillRank(
            self.wire,
            self.own.ranks[0],
            0,
            lambda: self.alive,
            verdict=lambda _: self.verdict,
            checksum_rate=1.0,
        )
        metadata = engine_metadata(
            block_size_tokens=8, num_blocks=BLOCKS, ranks=tuple(self.far.ranks)
        )
        self.targets = {"e1": encode(metadata)}

    def run(self, step: PrefillStep, layers: list[str] = NAMES) -> None:
        """One step: each layer writes its KV, and then reports it, if it is in `layers`."""
        for shard in self.own.shards[0]:
            for write in step.writes:
                shard.blocks[write.local_ids] = kv_of(shard)[write.local_ids]
            if str(shard.layer) in layers:
                self.rank.layer(step, str(shard.layer), lambda: True)
        self.rank.step(step, lambda: True)

    def chunk(
        self, local: list[int], first: int, *, last: bool, ended: bool = False
    ) -> PrefillStep:
        """Blocks of an attempt of 6, that go to BLOCKS - 1 and down."""
        remote = [BLOCKS - 1 - first - i for i in range(len(local))]
        write = BlockWrite("a1", "p1", "e1", local, remote, last, 6, 0.0, first)
        over = [("a1", "p1", True)] if ended else []
        return PrefillStep(writes=[write], targets=self.targets, ended=over)

    def received(self) -> list[tuple[set[str], set[str]]]:
        """What each decode rank has received, and lost."""
        blocks = tuple(range(BLOCKS - 1, BLOCKS - 7, -1))
        found = []
        for half in self.halves:
            half.step(expecting({"a1": "r1"}, blocks={"a1": blocks}, poll=True))
            results = half.results()
            found.append((results.received, results.lost))
        return found

    def assert_written(self, local: list[int]) -> None:
        """Every byte of every rank is what the prefill rank has, or zero."""
        mine = {shard.layer: shard for shard in self.own.shards[0]}
        for shards in self.far.shards:
            for shard in shards:
                wanted = np.zeros_like(shard.blocks)
                heads = slice(shard.heads.start, shard.heads.stop)
                for first, block in enumerate(local):
                    wanted[BLOCKS - 1 - first] = mine[shard.layer].blocks[block, heads]
                np.testing.assert_array_equal(shard.blocks, wanted)


@pytest.mark.parametrize("decode", [Shape(), Shape(tensor=2), Shape(pipeline=2)])
@pytest.mark.parametrize("told", [NAMES, NAMES[:2], NAMES[2:], ["unknown"]])
def test_every_byte_arrives_whichever_layers_were_streamed(decode: Shape, told: list[str]):
    pair = Pair(decode)
    pair.run(pair.chunk([3, 4, 9], 0, last=False), told)
    pair.run(pair.chunk([5, 1, 2], 3, last=True, ended=True), told)
    assert {request for _ in range(3) for request in pair.rank.results().sent} == {"p1"}
    assert pair.received() == [({"r1"}, set())] * len(pair.halves)
    pair.assert_written([3, 4, 9, 5, 1, 2])


def test_layers_go_while_the_step_runs_and_only_the_last_write_tells():
    pair = Pair(Shape())
    pair.wire.held = True
    step = pair.chunk([3, 4, 9, 5, 1, 2], 0, last=True, ended=True)
    for count, name in enumerate(NAMES[:-1], 1):
        pair.rank.layer(step, name, lambda: True)
        assert pair.wire.told == [False] * count
    pair.rank.layer(step, NAMES[-1], lambda: True)
    pair.rank.step(step, lambda: True)
    assert pair.wire.told == [False] * (LAYERS - 1), "the commit waits for all layers"
    pair.wire.held = False
    assert pair.rank.results().sent == set() or pair.wire.told[-1]
    assert pair.wire.told == [False] * (LAYERS - 1) + [True]
    assert [rank for rank, _ in pair.received()] == [{"r1"}]


def test_a_layer_whose_kernels_still_run_goes_with_the_write_after_the_step():
    pair = Pair(Shape())
    step, computed = pair.chunk([3, 4], 0, last=False), False
    pair.rank.layer(step, "0", lambda: True)
    pair.rank.layer(step, "1", lambda: computed)
    pair.rank.layer(step, "2", lambda: computed)
    pair.rank.step(step, lambda: computed)
    assert len(pair.wire.started) == 1
    computed = True
    pair.run(PrefillStep())
    assert pair.wire.told == [False, True]
    pair.run(pair.chunk([9, 5, 1, 2], 2, last=True, ended=True))
    assert [rank for rank, _ in pair.received()] == [{"r1"}]


def test_on_a_slow_wire_layers_do_not_overtake_earlier_blocks():
    pair = Pair(Shape())
    pair.wire.held = True
    pair.run(pair.chunk([3], 0, last=False))
    streamed = len(pair.wire.started)
    assert streamed == LAYERS - 1
    pair.run(pair.chunk([4], 1, last=False))
    assert len(pair.wire.started) == streamed
    pair.wire.held = False
    pair.run(pair.chunk([9, 5, 1, 2], 2, last=True, ended=True))
    assert [rank for rank, _ in pair.received()] == [{"r1"}]
    pair.assert_written([3, 4, 9, 5, 1, 2])


def test_nothing_is_written_early_behind_a_closed_fence():
    pair = Pair(Shape())
    pair.alive = False
    pair.run(pair.chunk([3, 4], 0, last=False))
    assert pair.wire.started == []
    pair.alive = True
    pair.rank.step(PrefillStep(ended=[("a1", "p1", False)]), lambda: True)
    assert pair.rank.results().sent == {"p1"}


def test_no_layer_is_written_before_the_claim_is_granted():
    pair = Pair(Shape())
    pair.verdict = PermitVerdict.PENDING
    pair.run(pair.chunk([3, 4], 0, last=False))
    assert pair.wire.started == []
    pair.verdict = PermitVerdict.GRANTED
    pair.run(pair.chunk([9, 5, 1, 2], 2, last=True, ended=True))
    assert [rank for rank, _ in pair.received()] == [{"r1"}]
    pair.assert_written([3, 4, 9, 5, 1, 2])


def test_a_preempted_job_begins_anew():
    pair = Pair(Shape())
    step = pair.chunk([3, 4], 0, last=False)
    pair.rank.layer(step, "0", lambda: False)
    pair.rank.drain_preempted(PrefillStep(preempted=["a1"]))
    pair.run(PrefillStep(preempted=["a1"]))
    assert pair.wire.started == []
    pair.run(pair.chunk([6, 7, 8, 9, 10, 11], 0, last=True, ended=True))
    assert [rank for rank, _ in pair.received()] == [{"r1"}]
    pair.assert_written([6, 7, 8, 9, 10, 11])


def test_a_layer_that_fails_fails_its_attempt():
    pair = Pair(Shape())
    pair.wire.failure = "connection reset"
    pair.run(pair.chunk([3, 4, 9, 5, 1, 2], 0, last=True, ended=True))
    assert pair.rank.results().sent == {"p1"}
    report = pair.rank.report()
    assert report is not None and "connection reset" in report.failures["a1"]
    assert pair.wire.told == [False]
