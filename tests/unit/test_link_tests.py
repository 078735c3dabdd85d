"""Ways between ranks are tried through scratch memory, over the mover's in-process twin."""

from dataclasses import dataclass

import msgspec
import pytest

from dynamo_lite.disagg.messages import (
    BlockWrite,
    LinkTestOrder,
    PrefillStep,
    RankLink,
    WorkerReport,
)
from dynamo_lite.disagg.prefill import link_test_rank
from dynamo_lite.disagg.prefill.rank import PrefillRank
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.errors import TransferError
from dynamo_lite.protocol.records import EngineMetadata
from dynamo_lite.runtime.clock import Clock
from dynamo_lite.simulation.engine.memory_mover import MemoryFabric, MemoryMover
from dynamo_lite.transfer.base import Transfer
from dynamo_lite.transfer.scratch import SLOTS, pattern, pick_slots
from tests.builders import engine_metadata
from tests.shards import BLOCK_TOKENS, Shape, ShardedEngine

HEADS, BLOCKS = 4, 8


@dataclass
class Held:
    """A transfer that does not end while its mover is held."""

    mover: "Wire"
    inner: Transfer

    def done(self) -> bool:
        self.mover.polls += 1
        return not self.mover.held and self.inner.done()


class Wire(MemoryMover):
    """meddle: called before each read starts. written: addresses, in order. removed: peers."""

    held = False
    polls = 0

    def __init__(self, fabric: MemoryFabric, name: str):
        super().__init__(fabric, name)
        self.written: list[int] = []
        self.removed: list[str] = []
        self.meddle = lambda address: None

    def write(self, peer, local, remote, *, memory, notice=b""):
        self.written += remote[:, 0].tolist()
        return Held(self, super().write(peer, local, remote, memory=memory, notice=notice))

    def remove_peer(self, peer):
        self.removed.append(peer)
        super().remove_peer(peer)

    def read(self, peer, local, remote, *, memory):
        self.meddle(int(remote[0, 0]))
        return Held(self, super().read(peer, local, remote, memory=memory))


class Engine:
    """Its ranks' memory."""

    def __init__(self, fabric: MemoryFabric, name: str, shape: Shape):
        count = shape.tensor * shape.pipeline
        self.name = name
        self.movers = [Wire(fabric, f"{name}-{rank}") for rank in range(count)]
        movers = dict(enumerate(self.movers))
        self.sharded = ShardedEngine(shape, HEADS, BLOCKS, movers, truth=name == "p")
        self.scratch, self.own = self.sharded.scratch, self.sharded.ranks

    def metadata(self) -> EngineMetadata:
        return engine_metadata(
            self.name, block_size_tokens=BLOCK_TOKENS, num_blocks=BLOCKS, ranks=tuple(self.own)
        )


class Prefill(Engine):
    """slots: of each rank's scratch memory. alive: its lease's fence. time: on its clock."""

    def __init__(self, fabric: MemoryFabric, shape: Shape, name: str = "p", slots: int = SLOTS):
        super().__init__(fabric, name, shape)
        for scratch in self.scratch:
            scratch.region = msgspec.structs.replace(scratch.region, slots=slots)
        self.alive, self.time = True, 0.0
        clock = Clock(monotonic=lambda: self.time, wall=lambda: 0.0)
        self.ranks = [
            PrefillRank(mover, own, rank, lambda: self.alive, clock, scratch=scratch)
            for rank, (mover, own, scratch) in enumerate(
                zip(self.movers, self.own, self.scratch, strict=True)
            )
        ]

    def start(self, target: Engine, order: str = "1.1") -> None:
        step = PrefillStep(
            link_tests=[LinkTestOrder(order, target.name)],
            targets={target.name: encode(target.metadata())},
            own=encode(self.metadata()),
        )
        for rank in self.ranks:
            rank.step(step, lambda: True)

    def ended(self) -> dict[str, dict[int, RankLink]]:
        """One engine step: what its ranks report."""
        report = WorkerReport()
        for rank in self.ranks:
            rank.results()
            report = report.joined(rank.report() or WorkerReport())
        return report.links


@pytest.fixture
def fabric() -> MemoryFabric:
    return MemoryFabric()


def untouched(engine: Engine) -> bool:
    return all(not shard.blocks.any() for rank in engine.sharded.shards for shard in rank)


@pytest.mark.parametrize(
    ("prefill", "decode", "lanes"),
    [
        pytest.param(Shape(), Shape(), [1], id="one to one"),
        pytest.param(Shape(tensor=2), Shape(tensor=4), [2, 2], id="TP 2 to 4"),
        pytest.param(Shape(tensor=4), Shape(tensor=2), [1, 1, 1, 1], id="TP 4 to 2"),
        pytest.param(Shape(tensor=2, pipeline=2), Shape(), [1, 1, 1, 1], id="all to one"),
    ],
)
def test_every_pair_of_ranks_that_share_kv_is_tried_and_no_block_is_touched(
    fabric, prefill, decode, lanes
):
    own, target = Prefill(fabric, prefill), Engine(fabric, "d", decode)
    own.start(target)
    links = own.ended()["1.1"]
    assert [links[rank].lanes for rank in range(len(own.ranks))] == lanes
    assert all(link.failure is None for link in links.values())
    written = [address for mover in own.movers for address in mover.written]
    assert len(written) == 2 * sum(lanes)
    inside = [
        sum(
            s.region.base <= a < s.region.base + s.region.slots * s.region.slot_bytes
            for a in written
        )
        for s in target.scratch
    ]
    assert all(inside) and sum(inside) == len(written)
    assert untouched(target)


def test_ranks_that_bring_nothing_have_nothing_to_try(fabric):
    """One head on two ranks: only one of them gives it."""
    own, target = Prefill(fabric, Shape(tensor=8)), Engine(fabric, "d", Shape())
    own.start(target)
    links = own.ended()["1.1"]
    assert sorted(link.lanes for link in links.values()) == [0] * 4 + [1] * 4
    assert all(link.failure is None for link in links.values())


def test_it_ends_in_a_later_step_and_says_how_long_it_took(fabric):
    own, target = Prefill(fabric, Shape()), Engine(fabric, "d", Shape())
    own.movers[0].held = True
    own.start(target)
    own.time = 0.25
    assert own.ended() == {}
    own.movers[0].held = False
    assert own.ended() == {"1.1": {0: RankLink(None, 1, 0.25, 0.0)}}
    assert own.ended() == {}


def test_what_was_written_is_what_the_peer_holds(fabric):
    own, target = Prefill(fabric, Shape()), Engine(fabric, "d", Shape())
    own.start(target)
    own.ended()
    scratch = target.own[0].scratch
    assert scratch is not None
    name = "1.1/0/d/0"
    found = target.scratch[0].read(pick_slots(name, scratch, 1)[0], scratch.slot_bytes)
    assert found == pattern(f"{name}/0/1", scratch.slot_bytes)


def test_of_two_writers_in_one_slot_one_goes_to_another(fabric, monkeypatch):
    monkeypatch.setattr(link_test_rank, "pick_slots", lambda name, *_: [7, int(name[0])])
    one, two = Prefill(fabric, Shape(), "p1"), Prefill(fabric, Shape(), "p2")
    target = Engine(fabric, "d", Shape())
    region = target.scratch[0].region

    def two_writes_meanwhile(_address: int) -> None:
        if not two.movers[0].written:
            two.start(target, "2.1")

    one.movers[0].meddle = two_writes_meanwhile
    one.start(target, "1.1")
    links = one.ended() | two.ended()
    assert [links[order][0].failure for order in ("1.1", "2.1")] == [None, None]
    slots = [
        [(a - region.base) // region.slot_bytes for a in w.movers[0].written] for w in (one, two)
    ]
    assert slots == [[7, 1, 1], [7, 7]]


def test_a_way_that_changes_bytes_is_refused_with_what_was_seen(fabric):
    own, target = Prefill(fabric, Shape()), Engine(fabric, "d", Shape())
    region = target.scratch[0].region

    def meddle(address: int) -> None:
        slot = (address - region.base) // region.slot_bytes
        first = target.scratch[0].read(slot, 1)[0]
        target.scratch[0].fill(slot, bytes([first ^ 1]))

    own.movers[0].meddle = meddle
    own.start(target)
    failure = own.ended()["1.1"][0].failure
    assert failure == "rank 0: 1 of 4096 bytes of a pattern came back changed, in each of 3 slots"
    assert untouched(target)


def test_a_peer_that_is_gone_fails_and_is_met_anew(fabric):
    own, target = Prefill(fabric, Shape()), Engine(fabric, "d", Shape())
    own.movers[0].held = True
    own.start(target)
    target.movers[0].close()
    own.movers[0].held = False
    assert own.ended()["1.1"][0].failure == "rank 0: the peer is gone"
    own.start(target, "1.2")
    failure = own.ended()["1.2"][0].failure
    assert failure is not None and "its metadata was not accepted" in failure
    back = Engine(fabric, "d", Shape())
    own.start(back, "1.3")
    assert own.ended()["1.3"][0].failure is None


def test_a_silent_peer_is_given_up_and_its_slots_stay_out_of_use(fabric):
    own, silent = Prefill(fabric, Shape(), slots=4), Engine(fabric, "d", Shape())
    mover = own.movers[0]
    mover.held = True
    own.start(silent)
    own.time = link_test_rank.LIMIT_S + 1
    failure = own.ended()["1.1"][0].failure
    assert failure == f"no answer of rank 0 within {link_test_rank.LIMIT_S:g} s"
    # Of its four slots, the one test has two and the next test the others.
    others = [Engine(fabric, f"e{i}", Shape()) for i in range(2)]
    for i, other in enumerate(others):
        own.start(other, f"2.{i}")
    own.ended()
    assert len(mover.written) == 2
    mover.held = False
    links = {**own.ended(), **own.ended()}
    assert [links[f"2.{i}"][0].failure for i in range(2)] == [None, None]
    polls = mover.polls
    own.ended()
    assert mover.polls == polls, "nothing is in flight any more"
    mover.held, before = True, len(mover.written)
    for i, other in enumerate(others):
        own.start(other, f"3.{i}")
    own.ended()
    assert len(mover.written) == before + 2, "all slots are free"


def test_a_peer_with_a_write_under_way_is_not_removed(fabric):
    """The removal would end the write as failed, although it may still be delivered."""
    own, target = Prefill(fabric, Shape()), Engine(fabric, "d", Shape())
    own.movers[0].held = True
    write = BlockWrite("a1", "r1", "d", [0], [0], last=False, num_blocks=2, scheduled=0.0)
    step = PrefillStep(
        writes=[write],
        targets={"d": encode(target.metadata())},
        own=encode(own.metadata()),
    )
    own.ranks[0].step(step, lambda: True)
    own.start(target)
    own.time = link_test_rank.LIMIT_S + 1
    assert own.ended()["1.1"][0].failure is not None
    assert own.movers[0].removed == []
    own.movers[0].held = False
    own.ended()
    own.movers[0].held = True
    own.start(target, "1.2")
    own.time += link_test_rank.LIMIT_S + 1
    assert own.ended()["1.2"][0].failure is not None
    assert own.movers[0].removed == ["d/0"], "nothing else uses it any more"


def test_more_peers_than_slots_take_turns(fabric):
    own = Prefill(fabric, Shape(), slots=4)
    own.movers[0].held = True
    targets = [Engine(fabric, f"d{i}", Shape()) for i in range(5)]
    for i, target in enumerate(targets):
        own.start(target, f"1.{i}")
    own.movers[0].held = False
    links: dict[str, dict[int, RankLink]] = {}
    for _ in range(3):
        links |= own.ended()
    assert [links[f"1.{i}"][0].failure for i in range(5)] == [None] * 5


def test_behind_a_closed_fence_nothing_is_written_or_moved_on(fabric):
    own, target = Prefill(fabric, Shape()), Engine(fabric, "d", Shape())
    own.alive = False
    own.start(target)
    assert own.ended() == {} and own.movers[0].written == []
    own.alive, own.movers[0].held = True, True
    own.ended()
    own.alive, polls = False, own.movers[0].polls
    assert own.ended() == {} and own.movers[0].polls == polls
    own.time = link_test_rank.LIMIT_S + 1
    failure = own.ended()["1.1"][0].failure
    assert failure is not None and "lease was not certain" in failure
    assert own.movers[0].polls == polls


def test_an_engine_without_scratch_memory_is_not_used(fabric):
    own, target = Prefill(fabric, Shape()), Engine(fabric, "d", Shape())
    target.own[0] = msgspec.structs.replace(target.own[0], scratch=None)
    own.start(target)
    assert own.ended()["1.1"][0].failure == "rank 0, or this one, has no scratch memory"


def test_a_broken_transfer_beside_good_ones_fails_the_engine(fabric):
    own, target = Prefill(fabric, Shape(), slots=4), Engine(fabric, "d", Shape(tensor=2))
    write = own.movers[0].write

    def breaks(peer, *args, **options):
        if peer == "d/1":
            raise TransferError(peer, "connection reset")
        return write(peer, *args, **options)

    own.movers[0].write = breaks
    own.start(target)
    assert own.ended()["1.1"][0].failure == "rank 1: connection reset"
    own.ended()
    # A test of two ranks needs all four slots.
    own.movers[0].write, own.movers[0].held = write, True
    before = len(own.movers[0].written)
    own.start(target, "1.2")
    own.ended()
    assert len(own.movers[0].written) == before + 2
