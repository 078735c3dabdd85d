"""A prefill rank and a decode rank whose blocks differ: what is staged, and for how long."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from dynamo_lite.disagg.decode.rank import DecodeRank
from dynamo_lite.disagg.messages import BlockWrite, DecodeStep, PrefillStep
from dynamo_lite.disagg.prefill import staging
from dynamo_lite.disagg.prefill.rank import PrefillRank
from dynamo_lite.disagg.prefill.staging import OpenTransposer, split
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.errors import TransferError
from dynamo_lite.protocol.prefill import decode_written
from dynamo_lite.transfer.nixl import NixlMover
from dynamo_lite.transfer.sharding import join
from dynamo_lite.transfer.transpose import slot_layout
from tests.builders import always_held, block_write, engine_metadata, expecting
from tests.shards import Shape, ShardedEngine, expected_of_tokens
from tests.twins.mover import MemoryFabric, MemoryMover

BLOCKS = 8
HERE, THERE = 8, 16
#: Blocks of the prompt here, and there; the first 16 tokens are the decode engine's own.
LOCAL, REMOTE = [5, 1, 2, 7, 3, 4, 6], [0, 6, 1]
TOKENS = [block * HERE + token for block in LOCAL for token in range(HERE)][THERE:]


class Pair:
    """opens: returns what opens the staging memory, in place of what is passed."""

    def __init__(self, opens: Callable[[OpenTransposer], OpenTransposer | None] = lambda own: own):
        fabric = MemoryFabric()
        self.mover, self.there = MemoryMover(fabric, "p"), MemoryMover(fabric, "d")
        ours, theirs = Shape(tokens=HERE), Shape(tokens=THERE, heads_first=False)
        self.source = ShardedEngine(ours, 4, BLOCKS, {0: self.mover}, truth=True)
        self.target = ShardedEngine(theirs, 4, BLOCKS, {0: self.there}, truth=False)
        self.prefill = PrefillRank(
            self.mover,
            self.source.ranks[0],
            0,
            always_held,
            open_transposer=opens(self.source.transposer(0)),
        )
        self.decode = DecodeRank(self.there, self.target.ranks[0])

    def expect(self, attempt: str = "a1") -> None:
        step = expecting({attempt: f"r-{attempt}"}, blocks={attempt: tuple(REMOTE)})
        self.decode.step(step)

    def step(self, *writes: BlockWrite, ended: bool = False, **more) -> None:
        target = engine_metadata(
            "d", block_size_tokens=THERE, num_blocks=BLOCKS, ranks=tuple(self.target.ranks)
        )
        ends = [(write.of.attempt, True) for write in writes if ended]
        step = PrefillStep(writes=list(writes), targets={"d": encode(target)}, ended=ends, **more)
        self.prefill.step(step, lambda: True)

    def settle(self) -> tuple[set[str], set[str]]:
        self.decode.step(DecodeStep(poll=True))
        results = self.decode.results()
        return results.received, results.lost

    def failures(self) -> dict[str, str]:
        self.prefill.results()
        report = self.prefill.report()
        return report.failures if report else {}

    def check(self) -> None:
        for shard in self.target.shards[0]:
            np.testing.assert_array_equal(shard.blocks, expected_of_tokens(shard, TOKENS, REMOTE))

    @property
    def started(self) -> Counter[str]:
        """Writes, by attempt."""
        return Counter(decode_written(one._notice).attempt for one in self.mover.transfers)

    def go_on(self) -> None:
        self.mover.hold = False
        self.mover.let_go()

    def free_slots(self) -> int:
        """How many more writes start while none ends. They keep the slots."""
        self.mover.hold, self.mover.broken = True, ()
        before = self.started.total()
        for number in range(staging.SLOTS + 1):
            self.step(write(0, 1, attempt=f"more-{number}"))
        return self.started.total() - before


def write(first: int, end: int, *, attempt: str = "a1") -> BlockWrite:
    """Of the decode engine's blocks first to end, which begin at token 16 of the prompt."""
    start = (first + 1) * THERE // HERE
    return block_write(
        attempt,
        LOCAL[start : (end + 1) * THERE // HERE],
        REMOTE[first:end],
        target_engine="d",
        last=end == len(REMOTE),
        num_blocks=len(REMOTE),
        first=first,
    )


def test_blocks_arrive_as_the_receiver_has_them():
    pair = Pair()
    pair.expect()
    pair.step(write(0, 1))
    pair.step(write(1, 3), ended=True)
    assert (pair.prefill.results().sent, pair.failures()) == ({"a1"}, {})
    assert pair.settle() == ({"r-a1"}, set())
    pair.check()
    assert pair.free_slots() == staging.SLOTS


def test_what_landed_of_a_lost_attempt_counts_the_receiver_s_blocks():
    pair = Pair()
    pair.expect()
    pair.step(write(0, 2))
    pair.prefill.results()
    said = decode_written(pair.there.inbox[0])
    assert not said.last and (said.first, said.num_blocks) == (0, 2)
    pair.decode.step(DecodeStep(poll=True))
    pair.decode.step(DecodeStep(give_up=[("a1", "r-a1")], poll=True))
    report = pair.decode.report()
    assert report is not None and report.landed == {"r-a1": 2}


def test_a_write_waits_for_a_slot_and_then_goes():
    pair = Pair()
    pair.mover.hold = True
    names = [f"a{number}" for number in range(staging.SLOTS + 1)]
    for name in names:
        pair.expect(name)
        pair.step(write(0, 1, attempt=name))
    assert pair.started == dict.fromkeys(names[:-1], 1)
    pair.go_on()
    for name in names:
        pair.step(write(1, 3, attempt=name), ended=True)
    sent = set[str]()
    while len(sent) < len(names):
        sent |= pair.prefill.results().sent
    assert pair.settle() == ({f"r-{name}" for name in names}, set())
    assert pair.free_slots() == staging.SLOTS


def test_a_preempted_attempt_writes_all_again():
    """What was in flight has ended before."""
    pair = Pair()
    pair.expect()
    pair.mover.hold = True
    pair.step(write(0, 1))
    pair.go_on()
    pair.prefill.drain_preempted(PrefillStep(preempted=["a1"]))
    assert all(transfer.over for transfer in pair.mover.transfers)
    pair.step(write(0, 2))
    pair.step(write(2, 3), ended=True)
    pair.prefill.results()
    assert pair.settle() == ({"r-a1"}, set())
    pair.check()
    assert pair.free_slots() == staging.SLOTS


@pytest.mark.parametrize("stopped", [True, False])
def test_slots_come_back_however_an_attempt_ends(stopped):
    pair = Pair()
    if stopped:
        pair.mover.hold = True
        for name in ("a1", "a2", "a3", "a4", "a5"):
            pair.step(write(0, 1, attempt=name))
        ended = [(name, False) for name in ("a1", "a2", "a3", "a4", "a5")]
        pair.prefill.step(PrefillStep(ended=ended), lambda: True)
        pair.go_on()
        assert len(pair.prefill.results().sent) == 5
    else:
        pair.step(write(0, 1))
        pair.mover.broken = ("d/0",)
        pair.step(write(1, 3), ended=True)
        assert "connection reset" in pair.failures()["a1"]
    assert pair.free_slots() == staging.SLOTS


def test_a_write_that_waits_for_its_copy_is_not_started():
    """On a GPU the copy is queued, and its slot is reported as filled later."""
    filled: list[bool] = []

    class Queued:
        def __init__(self, real: staging.Transposer):
            self._real = real
            self.address = real.address

        def transpose(self, layout, units, offset):
            self._real.transpose(layout, units, offset)
            return lambda: bool(filled)

    pair = Pair(lambda real: lambda size: Queued(real(size)))
    pair.expect()
    pair.step(write(0, 3), ended=True)
    assert not pair.prefill.results().sent and not pair.there.inbox
    filled.append(True)
    assert pair.prefill.results().sent == {"a1"}
    assert pair.settle() == ({"r-a1"}, set())
    pair.check()


def test_without_staging_memory_the_peer_is_refused():
    pair = Pair(lambda real: None)
    pair.step(write(0, 3), ended=True)
    assert "this rank has no staging memory" in pair.failures()["a1"]

    def none_left(size):
        raise RuntimeError("out of memory")

    pair = Pair(lambda real: none_left)
    pair.step(write(0, 3), ended=True)
    assert "bytes of staging: out of memory" in pair.failures()["a1"]


def _cannot_stage(_layout: object, written: BlockWrite) -> None:
    raise TransferError(
        written.of.target_engine, "could not stage blocks: an illegal memory access"
    )


def test_a_copy_that_fails_disconnects_the_peer_and_removes_its_agent(
    monkeypatch: pytest.MonkeyPatch,
):
    removed: list[str] = []
    pair = Pair()
    remove = pair.mover.remove_peer
    monkeypatch.setattr(
        pair.mover, "remove_peer", lambda name: (removed.append(name), remove(name))
    )
    with monkeypatch.context() as patch:
        patch.setattr(pair.prefill._staging, "fill", _cannot_stage)
        pair.step(write(0, 3), ended=True)
    assert "an illegal memory access" in pair.failures()["a1"]
    assert removed == ["d/0"]
    pair.expect("a2")
    pair.step(write(0, 3, attempt="a2"), ended=True)
    assert (pair.prefill.results().sent, pair.failures()) == ({"a2"}, {})


def test_staging_memory_that_cannot_be_registered_fails_only_that_link(
    monkeypatch: pytest.MonkeyPatch,
):
    """The engine's step goes on, peers with the same blocks are written to, and a later try of
    the link may succeed."""
    pair = Pair()
    alike = engine_metadata(
        "e", block_size_tokens=HERE, num_blocks=BLOCKS, ranks=tuple(pair.source.ranks)
    )

    def full(*_: object) -> None:
        raise Exception("NIXL_ERR_BACKEND")  # NIXL's errors have no other base

    with monkeypatch.context() as patch:
        patch.setattr(pair.mover, "register", full)
        pair.step(write(0, 3), ended=True)
    size = staging.SLOTS * staging.SLOT_BYTES
    why = f"{size} bytes of staging could not be registered: NIXL_ERR_BACKEND"
    assert why in pair.failures()["a1"]
    # Its blocks are this rank's own: nothing changes.
    plain = block_write("a2", [1], [1], target_engine="e", last=True, num_blocks=1)
    pair.prefill.step(
        PrefillStep(writes=[plain], targets={"e": encode(alike)}, ended=[("a2", True)]),
        lambda: True,
    )
    assert (pair.prefill.results().sent, pair.failures()) == ({"a2"}, {})
    pair.expect("a3")
    pair.step(write(0, 3, attempt="a3"), ended=True)
    assert (pair.prefill.results().sent, pair.failures()) == ({"a3"}, {})
    assert pair.settle() == ({"r-a3"}, set())
    pair.check()
    assert pair.free_slots() == staging.SLOTS


def test_real_nixl_refuses_memory_of_another_kind_and_the_link_fails():
    """Host memory that is said to be of a GPU stands for memory that NIXL cannot register."""
    pair = Pair()
    own = msgspec.structs.replace(pair.source.ranks[0], memory="VRAM")
    lanes = [
        replace(lane, staged=True) for lane in join("d", pair.source.ranks, pair.target.ranks)[0, 0]
    ]
    mover = NixlMover("unregistrable")
    try:
        memory = staging.Staging(mover, own, pair.source.transposer(0), slots=1, slot_bytes=1 << 16)
        for _ in range(2):
            with pytest.raises(TransferError, match="staging could not be registered: NIXL_ERR"):
                memory.layout("d", lanes)
    finally:
        mover.close()


@pytest.mark.parametrize("skip", [0, 8, 16])
@pytest.mark.parametrize(("here", "there"), [(8, 16), (24, 16), (16, 16)])
def test_parts_of_a_write_have_all_its_tokens_once(here, there, skip):
    fabric = MemoryFabric()
    ours = ShardedEngine(Shape(tokens=here), 1, 2, {0: MemoryMover(fabric, "p")}, truth=False)
    theirs = ShardedEngine(
        Shape(tokens=there, heads_first=False), 1, 2, {0: MemoryMover(fabric, "d")}, truth=False
    )
    lanes = [replace(lane, staged=True) for lane in join("d", ours.ranks, theirs.ranks)[0, 0]]
    layout = slot_layout(lanes, 2 * sum(lane.remote.block_bytes for lane in lanes))
    remote_ids = list(range(5))
    local_ids = list(range(100, 100 - (-(skip + 5 * there) // here)))
    whole = replace(write(0, 3), local_ids=local_ids, remote_ids=remote_ids, skip_tokens=skip)
    parts = split(whole, layout)
    assert [(part.first, part.remote_ids, part.last) for part in parts] == [
        (0, [0, 1], False),
        (2, [2, 3], False),
        (4, [4], True),
    ]
    for part in parts:
        tokens = [block * here + token for block in part.local_ids for token in range(here)]
        begin = 100 * here + skip + part.first * there
        count = len(part.remote_ids) * there
        found = tokens[part.skip_tokens :][:count]
        assert found == list(range(begin, begin + count))
        assert part.skip_tokens < here or not part.local_ids
