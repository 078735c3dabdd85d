"""The spans that workers record for a traced request, and that other requests have none."""

from dataclasses import replace
from typing import Any

import pytest

from dynamo_lite.disagg.counters import SPAN
from dynamo_lite.disagg.messages import RankResults
from dynamo_lite.disagg.metrics import STAGE
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.prefill import Claim
from dynamo_lite.protocol.trace import new_trace
from tests.builders import CLAIM, ManualClock
from tests.unit.decode_engine import WRITER, Decode, prompt
from tests.unit.recorder import Recorder
from tests.unit.test_prefix_reads import Half as Reader
from tests.unit.test_ranks import Decode as DecodeMemory
from tests.unit.test_ranks import MemoryFabric as Fabric
from tests.unit.test_ranks import Prefill, blocks, targets

HOSTILE = {"traceparent": "00-" + "0" * 32 + "-00f067aa0ba902b7-01"}


def noted(half: Any) -> Recorder:
    """The half's notes as its component passes them on."""
    recorder = Recorder()
    recorder.record_notes(half.stats.data.get(SPAN, []))
    return recorder


async def remote(decode: Decode, clock: ManualClock, headers: Any) -> str:
    """One that is claimed. Its stages take 1, 2, 4, ... seconds. Returns the attempt."""
    request = prompt("r1", 101, trace_headers=headers)
    assert decode.admit(request) > 0
    [attempt] = decode.half.build_step().expect
    clock.now += 1
    await decode.network()
    clock.now += 2 + 4
    claim = Claim(attempt=attempt, claim=CLAIM, writer_lease_id=WRITER)
    await decode.attempts.on_claim(encode(claim))
    decode.half.build_step()
    return attempt


@pytest.mark.parametrize("headers", [None, {}, HOSTILE, {"traceparent": "x" * 10_000}])
async def test_what_is_not_traced_is_measured_and_has_no_span(
    decode: Decode, clock: ManualClock, headers: Any
):
    await remote(decode, clock, headers)
    assert (await decode.job()).trace_headers is None
    clock.now += 8
    decode.output("r1")
    decode.half.state_after_alloc(prompt("r1", 101, trace_headers=headers), [], 0)
    assert SPAN not in decode.half.stats.data
    assert decode.half.stats.data[f"{STAGE}/fill"] == [8]


@pytest.mark.parametrize("rank", [0, 1])
def test_each_write_of_a_job_is_reported_by_one_rank(rank: int):
    fabric, above = Fabric(), new_trace()
    decode, prefill = DecodeMemory(fabric, "e1"), Prefill(fabric, rank)
    chunks = [blocks([3, 4], [10, 11]), blocks([5], [12], last=True, first=2)]
    for write in chunks:
        write.of = replace(write.of, trace=above)
        prefill.step(write, targets=targets(decode))
    prefill.step(ended=[("a1", True)])
    assert prefill.ended() == ({"a1"}, {})
    spans = noted(prefill.rank).spans
    if rank:
        assert not spans
        return
    assert {span.parent for span in spans} == {above.span_id}
    found = [(span.name, span.attributes["dynamo_lite.blocks"]) for span in spans]
    assert found == [("transfer", 2), ("transfer", 1)]


@pytest.mark.parametrize("lost", [False, True])
def test_the_reading_of_a_prefix_has_a_span(lost: bool):
    reader, above = Reader(), new_trace()
    job = reader.job()
    job.trace_headers = above.headers()
    assert reader.admit(job, cached=4) == 12
    reader.step()
    assert SPAN not in reader.half.stats.data
    read = {"lost" if lost else "received": {"a1"}}
    reader.half.worker_output(RankResults(**read), None)
    [span] = noted(reader.half).spans
    assert (span.name, span.parent) == ("prefix read", above.span_id)
    [write] = reader.step(a1=10).writes
    assert write.of.trace == above
