"""Prefixes that a prefill engine reads: its scheduler half, and a rank against a decode rank's
memory over the mover's in-process twin."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from dynamo_lite.disagg.bridge import OpenSession
from dynamo_lite.disagg.messages import (
    PrefillStep,
    PrefixRead,
    RankResults,
    WorkerReport,
    WritingAttempt,
)
from dynamo_lite.disagg.prefill import remote_ranks
from dynamo_lite.disagg.prefill.rank import PrefillRank
from dynamo_lite.disagg.prefill.scheduler import PrefillScheduler
from dynamo_lite.disagg.transfer_params import PrefillJobParams, pack, unpack
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.records import RankMetadata
from dynamo_lite.runtime.claim_cells import Cell
from tests.builders import HELD, PREFILL_ROLE, always_held, engine_config, engine_metadata
from tests.shards import Shape, engine, expected
from tests.twins.mover import MemoryFabric
from tests.twins.servers import MemoryMessaging
from tests.unit.test_rank_groups import SIZES
from tests.unit.test_ranks import Decode, Prefill, blocks, targets

BLOCK = 4
CELL = Cell(2, 5)


@pytest.fixture
def fabric() -> MemoryFabric:
    return MemoryFabric()


@pytest.fixture
def decode(fabric) -> Decode:
    engine = Decode(fabric, "e1")
    engine.memory.blocks[:] = 7
    return engine


@pytest.fixture
def prefill(fabric) -> Prefill:
    return Prefill(fabric)


def read(local: list[int], remote: list[int], attempt: str = "a1", cell: Cell = HELD) -> PrefixRead:
    return PrefixRead(WritingAttempt(attempt, "e1", cell=cell), local, remote)


def of(prefill: Prefill) -> tuple[set[str], set[str]]:
    results = prefill.rank.results()
    return results.received, results.lost


def own(prefill: Prefill) -> list[int]:
    return [int(row[0]) for row in prefill.memory.blocks]


# The rank


def test_a_prefix_is_read_into_its_blocks_and_nowhere_else(prefill, decode):
    decode.memory.blocks[9] = 9
    prefill.step(reads=[read([3, 5], [8, 9])], targets=targets(decode))
    assert of(prefill) == ({"a1"}, set())
    assert of(prefill) == (set(), set())
    expected = [100 + i for i in range(32)]
    expected[3], expected[5] = 7, 9
    assert own(prefill) == expected
    assert prefill.rank.stats.take() == {"prefix_read/read": 1, "prefix_bytes": 128}


@pytest.mark.parametrize("how", ["never", "refused", "run out", "of another claim"])
def test_a_prefix_whose_claim_does_not_hold_is_not_read(prefill, decode, how):
    opened = prefill.claim(for_s=0.0 if how == "never" else 3.0)
    cell = opened.cell
    match how:
        case "refused":
            opened.hold_until(0.0)
        case "run out":
            prefill.now += 3.0
        case "of another claim":
            opened.free()
            assert prefill.claim(2, for_s=60.0).cell.index == cell.index
    prefill.step(reads=[read([3], [8], cell=cell)], targets=targets(decode))
    assert of(prefill) == (set(), {"a1"})
    assert of(prefill) == (set(), set())
    assert prefill.mover.transfers == [] and own(prefill)[3] == 103
    assert prefill.rank.stats.take() == {}


def test_what_was_read_after_the_end_of_its_claim_is_not_used(prefill, decode):
    """Its decode engine may have changed the blocks meanwhile."""
    prefill.mover.hold = True
    opened = prefill.claim(for_s=3.0)
    prefill.step(reads=[read([3], [8], cell=opened.cell)], targets=targets(decode))
    prefill.now += 3.0
    assert of(prefill) == (set(), set()), "it may still change its blocks"
    prefill.mover.let_go()
    assert of(prefill) == (set(), {"a1"})


def test_a_rank_that_stood_still_in_a_read_does_not_use_it(prefill, decode):
    prefill.mover.hold = True
    opened = prefill.claim(for_s=3.0)
    prefill.step(reads=[read([3], [8], cell=opened.cell)], targets=targets(decode))

    def stand_still() -> bool:
        prefill.now += 60.0
        return True

    prefill.mover.transfers[0].done = stand_still
    assert of(prefill) == (set(), {"a1"})


def test_a_read_is_over_when_it_has_ended(prefill, decode, fabric, monkeypatch):
    prefill.mover.hold = True
    prefill.step(reads=[read([3], [8])], targets=targets(decode))
    monkeypatch.setattr(remote_ranks, "_MOST_ENGINES", 0)
    prefill.step(targets=targets(Decode(fabric, "e2")))
    assert of(prefill) == (set(), set())
    assert prefill.mover.removed == [], "it is still read from"
    prefill.mover.let_go()
    assert of(prefill) == ({"a1"}, set())
    prefill.step(targets=targets(Decode(fabric, "e3")))
    assert of(prefill) == (set(), set()) and "e1/0" in prefill.mover.removed


def test_a_failed_read_is_computed_and_its_engine_met_again(prefill, decode):
    """Until its peer is removed it may still change its blocks."""
    prefill.mover.hold = True
    prefill.step(blocks([1], [2], attempt="a2"), reads=[read([3], [8])], targets=targets(decode))
    prefill.mover.transfers[0].failure = "no route"
    assert of(prefill) == (set(), set()) and prefill.mover.removed == []
    report = prefill.rank.report()
    assert report is not None and "no route" in report.broken["e1"]
    prefill.mover.let_go()
    assert of(prefill) == (set(), {"a1"}) and prefill.mover.removed == ["e1/0"]
    prefill.mover.hold = False
    prefill.step(blocks([4], [3], attempt="a3"), targets=targets(decode))
    assert decode.memory.blocks[2:4, 0].tolist() == [101, 104]


@pytest.mark.parametrize("wrong", ["other layers", "closed"])
def test_what_cannot_be_read_is_computed(prefill, decode, fabric, wrong):
    met = targets(decode)
    match wrong:
        case "other layers":
            met = targets(Decode(fabric, "e1", layer="1"))
        case "closed":
            decode.mover.close()
    prefill.step(reads=[read([3], [8])], targets=met)
    assert of(prefill) == (set(), {"a1"})
    assert own(prefill)[3] == 103


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("there", SIZES, ids=str)
@pytest.mark.parametrize("here", SIZES, ids=str)
def test_ranks_of_any_number_read_what_each_of_them_holds(here, there, heads):
    fabric = MemoryFabric()
    engines = reader, holder = (
        engine(fabric, "p", Shape(*here), heads, 8, truth=False),
        engine(fabric, "d", Shape(*there), heads, 8, truth=True),
    )
    own, target = (
        encode(engine_metadata(block_size_tokens=8, ranks=tuple(each.ranks))) for each in engines
    )
    for index, (mover, memory) in enumerate(zip(reader.movers, reader.ranks, strict=True)):
        rank = PrefillRank(mover, memory, index, always_held)
        step = PrefillStep(reads=[read([0, 1, 6], [5, 1, 2])], targets={"e1": target})
        step.own = own if len(reader.ranks) > 1 else b""
        rank.step(step, lambda: True)
        assert rank.results().received == {"a1"}
    assert len(holder.ranks) == len(holder.movers)
    for shard in [shard for rank in reader.shards for shard in rank]:
        np.testing.assert_array_equal(shard.blocks, expected(shard, [5, 1, 2], [0, 1, 6]))


# The scheduler half


class Half:
    """session: that of its bridge, to be opened on `messaging`."""

    session: OpenSession

    def __init__(self) -> None:
        self.messaging = MemoryMessaging()
        self.half = PrefillScheduler(
            engine_config(PREFILL_ROLE, engine_id="p1"),
            BLOCK,
            None,  # type: ignore[arg-type]
            lambda name, _tokens: [self.blocks[name]],
            clients=SimpleNamespace(messaging=lambda: nullcontext(self.messaging)),  # type: ignore[arg-type]
            open_bridge=self._open_bridge,
        )
        self.blocks: dict[str, list[int]] = {}

    def _open_bridge(self, session: OpenSession) -> Any:
        self.session = session

    def job(self, name: str = "a1", tokens: int = 26, prefix: int = 4) -> Any:
        """Blocks 50.. are the decode engine's prefix, 60.. those to be written."""
        params = PrefillJobParams(
            engine_id="e1",
            num_computed_tokens=prefix * BLOCK,
            num_tokens=tokens,
            block_size=BLOCK,
            block_ids=list(range(60, 60 - prefix + -(-tokens // BLOCK))),
            prefix_block_ids=list(range(50, 50 + prefix)),
            target=b"e1's",
            cell=CELL,
        )
        return SimpleNamespace(
            request_id=name,
            num_prompt_tokens=tokens,
            num_computed_tokens=0,
            kv_transfer_params=pack(params),
            trace_headers=None,
        )

    def admit(self, job: Any, cached: int = 0) -> int:
        external, waits = self.half.num_new_matched_tokens(job, cached)
        assert waits == (external > 0)
        self.blocks[job.request_id] = list(range(-(-job.num_prompt_tokens // BLOCK)))
        job.num_computed_tokens = cached + external
        self.half.state_after_alloc(job, self.blocks[job.request_id], external)
        return external

    def step(self, **scheduled: int) -> PrefillStep:
        return self.half.build_step(scheduled, ())

    def told(self) -> list[list[str]]:
        return self.half.stats.take().get("ended", [])


@pytest.fixture
def half() -> Half:
    return Half()


def test_what_another_connector_can_load_is_not_read():
    half, job = Half(), Half().job()
    assert half.half.may_load(job)
    assert half.half.num_new_matched_tokens(job, 4, 12) == (0, False)
    assert half.half.num_new_matched_tokens(job, 4, 4) == (12, True)
    assert half.admit(job, 16) == 0
    assert not half.half.may_load(job), "a preempted one is computed"
    half.half.worker_output(RankResults(sent={"another's"}), None)


def test_what_this_engine_lacks_is_read_before_the_rest_is_computed(half: Half):
    job = half.job()
    assert half.admit(job, cached=4) == 12
    step = half.step()
    [read] = step.reads
    assert (read.of.attempt, read.of.target_engine, read.of.cell) == ("a1", "e1", CELL)
    assert (read.local_ids, read.remote_ids) == ([1, 2, 3], [51, 52, 53])
    assert step.targets == {"e1": b"e1's"} and step.writes == []
    half.half.worker_output(RankResults(received={"a1"}), None)
    assert half.admit(job, cached=16) == 0
    [write] = half.step(a1=10).writes
    assert (write.local_ids, write.remote_ids, write.last) == ([4, 5, 6], [60, 61, 62], True)


@pytest.mark.parametrize(("prefix", "cached"), [(0, 0), (4, 12), (4, 16), (4, 24), (1, 0)])
def test_little_or_nothing_is_not_read(half: Half, prefix, cached):
    assert half.admit(half.job(prefix=prefix), cached) == 0
    assert half.step().reads == []


def test_the_end_of_a_stopped_job_is_reported_when_its_read_has_ended(half: Half):
    job = half.job()
    half.admit(job)
    half.step()
    assert half.half.request_finished(job) is False
    assert half.half.busy and half.told() == []
    half.half.worker_output(RankResults(received={"a1"}), None)
    assert half.told() == [["a1", "abandoned", ""]]
    assert not half.half.busy


def change(job: Any, **more: Any) -> None:
    """more: parameters of the job that are replaced."""
    params = unpack(job, PrefillJobParams)
    assert params is not None
    job.kv_transfer_params = pack(msgspec.structs.replace(params, **more))


def other_sizes(half: Half, size: int, tokens: int, prefix: int) -> Any:
    """A job of a decode engine with blocks of `size` tokens, `prefix` of which it has."""
    job = half.job(tokens=tokens, prefix=0)
    blocks = list(range(60, 60 - prefix + -(-tokens // size)))
    change(job, num_computed_tokens=prefix * size, block_size=size, block_ids=blocks)
    assert half.admit(job) == 0
    return job


def written(step: PrefillStep) -> list[tuple]:
    return [(w.local_ids, w.skip_tokens, w.remote_ids, w.first, w.last) for w in step.writes]


def test_larger_blocks_are_written_when_all_their_tokens_are_computed(half: Half):
    job = other_sizes(half, size=8, tokens=26, prefix=1)
    assert written(half.step(a1=12)) == []
    job.num_computed_tokens = 12
    assert written(half.step(a1=5)) == [([2, 3], 0, [60], 0, False)]
    job.num_computed_tokens = 17
    assert written(half.step(a1=9)) == [([4, 5, 6], 0, [61, 62], 1, True)]


def test_blocks_of_an_odd_ratio_begin_inside_of_ours(half: Half):
    job = other_sizes(half, size=6, tokens=20, prefix=1)
    assert written(half.step(a1=13)) == [([1, 2], 2, [60], 0, False)]
    half.half.build_step({}, ["a1"])
    job.num_computed_tokens = 0
    assert written(half.step(a1=20)) == [([1, 2, 3, 4], 2, [60, 61, 62], 0, True)]


# The token to sample from


@pytest.mark.parametrize("prefix", [0, 1])
def test_the_last_write_waits_for_the_token_to_sample_from(half: Half, prefix: int):
    """The KV of the last prompt token is not wanted, but its logits are."""
    job = half.job(tokens=9, prefix=prefix)
    change(job, num_tokens=8, block_ids=[60, 61][prefix:])
    assert half.admit(job) == 0
    # All KV that is wanted, and a block of it is left for the last write.
    first = [([0], 0, [60], 0, False)] if prefix == 0 else []
    assert written(half.step(a1=8)) == first
    job.num_computed_tokens = 8
    assert written(half.step(a1=1)) == [([1], 0, [61], 1 - prefix, True)]
    assert half.half.request_finished(job) is True
    assert half.step().ended == [("a1", True)]


def test_the_block_of_the_token_to_sample_from_is_not_written(half: Half):
    job = half.job(tokens=9, prefix=0)
    change(job, num_tokens=8, block_ids=[60, 61])
    assert half.admit(job) == 0
    assert written(half.step(a1=9)) == [([0, 1], 0, [60, 61], 0, True)]


# Which engines the ranks know


def told_of(half: Half, name: str, **more: Any) -> PrefillStep:
    """The step with the whole of a new job. more: of its parameters."""
    job = half.job(name, tokens=8, prefix=0)
    change(job, **more)
    assert half.admit(job) == 0
    return half.step(**{name: 8})


def test_the_ranks_get_an_engine_with_each_job(half: Half):
    """In the step with its read and in that with its first write, also after a preemption: each
    may find the engine disconnected."""
    assert told_of(half, "a1").targets == {"e1": b"e1's"}
    assert told_of(half, "a2", engine_id="e2", target=b"e2's").targets == {"e2": b"e2's"}
    job = half.job("a3")
    half.admit(job)
    assert half.step().targets == {"e1": b"e1's"}
    half.half.worker_output(RankResults(received={"a3"}), None)
    half.admit(job, cached=16)
    assert half.step(a3=4).targets == {"e1": b"e1's"}
    job.num_computed_tokens = 20
    assert half.step(a3=4).targets == {}
    half.half.build_step({}, ["a3"])
    job.num_computed_tokens = 0
    assert half.step(a3=20).targets == {"e1": b"e1's"}


def test_a_job_that_has_written_nothing_ends_at_once(half: Half):
    job = half.job()
    half.admit(job)
    half.step()
    half.half.worker_output(RankResults(received={"a1"}), None)
    assert half.half.request_finished(job) is False
    assert half.told() == [["a1", "abandoned", ""]] and half.step().ended == []


def test_siblings_get_each_other_with_the_engine_that_they_meet(half: Half):
    rank = RankMetadata(agent=b"", memory="DRAM", device=0, regions=())
    half.half.metadata = own = engine_metadata("p1", ranks=(rank, rank))
    assert told_of(half, "a1").own == encode(own)
    assert half.step().own == b""


def test_links_that_broke_are_reported_to_the_component(half: Half):
    half.half.worker_output(RankResults(), WorkerReport(broken={"e1": "reset"}))
    assert half.half.stats.take() == {"broken_link": [["e1", "reset"]]}
