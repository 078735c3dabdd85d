"""The engine-core protocol towards vLLM's Rust frontend, over a failover client that records."""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest, EngineCoreRequestType, FinishReason
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from dynamo_lite.protocol.errors import NoWorkers, WorkerLost
from dynamo_lite.protocol.generate import GenerateRequest, LogprobRows, PrefillCounts, TokenDelta
from dynamo_lite.protocol.trace import TraceContext, new_trace
from dynamo_lite.request_plane.migrating_request import MigrationPlan
from dynamo_lite.vllm.frontend.rust_core import CheckGrammar, RustCore
from dynamo_lite.vllm.wire import sampling_from_bytes
from tests.builders import eventually
from tests.unit.frontend_core import CoreScene
from tests.unit.recorder import Recorder
from tests.vllm.without_engines.test_inputs import feature


class Tracing(Recorder):
    """Traces every request."""

    def begin(self, incoming: TraceContext | None) -> TraceContext | None:
        return new_trace()


class Scene(CoreScene):
    """check: what checks a grammar."""

    def __init__(
        self,
        in_flight: int = 8,
        tracer: Any = None,
        *,
        timeout_s: float = 60.0,
        check: CheckGrammar | None = None,
    ) -> None:
        super().__init__(in_flight, tracer)
        self.sent: list[list[bytes]] = []
        self.core = RustCore(
            self.intake,
            lambda frames: self.sent.append([bytes(f) for f in frames]),
            check or _no_grammar,
            causal=True,
            timeout_s=timeout_s,
        )

    async def take(self, kind: EngineCoreRequestType, content: Any) -> None:
        self.core.take([kind.value, *(bytes(part) for part in MsgpackEncoder().encode(content))])
        for _ in range(3):
            await asyncio.sleep(0)

    async def add(self, request_id: str, **fields: Any) -> None:
        given: dict[str, Any] = {
            "prompt_token_ids": [1, 2, 3],
            "sampling_params": SamplingParams(temperature=0.0, max_tokens=4, watermarking=True),
            "mm_features": None,
            **fields,
        }
        request = EngineCoreRequest(
            request_id=request_id,
            pooling_params=None,
            arrival_time=5.0,
            lora_request=None,
            cache_salt="salt",
            data_parallel_rank=None,
            external_req_id=request_id,
            **given,
        )
        await self.take(EngineCoreRequestType.ADD, request)

    def steps(self) -> list[EngineCoreOutputs]:
        sent, self.sent = self.sent, []
        # Writable, as torch wants them.
        steps = [[bytearray(frame) for frame in frames] for frames in sent]
        return [MsgpackDecoder(EngineCoreOutputs).decode(frames) for frames in steps]

    def ends(self) -> dict[str, FinishReason | None]:
        return {o.request_id: o.finish_reason for step in self.steps() for o in step.outputs}


async def _no_grammar(params: SamplingParams) -> None:
    raise AssertionError("no request has a grammar")


def grammar() -> SamplingParams:
    return SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))


@pytest.fixture
def scene() -> Scene:
    return Scene()


async def test_a_request_frame_becomes_a_request_to_a_worker(scene: Scene):
    await scene.add("r1", session_id="s", priority=3)
    [message] = scene.failover.submitted
    assert (message.request_id, message.prompt_token_ids) == ("r1", [1, 2, 3])
    assert (message.session, message.priority, message.cache_salt) == ("s", 3, "salt")
    assert message.timeout_s == pytest.approx(60.0, abs=5.0)
    sampling = sampling_from_bytes(message.sampling)
    assert (sampling.max_tokens, sampling.watermarking) == (4, False)
    # Greedy: with the watermark that the Rust frontend asks for it could only be replayed.
    assert scene.failover.plans[0] == MigrationPlan()
    assert scene.core.in_flight == 1 and scene.sent == []


async def test_a_long_session_id_is_cut_and_an_empty_one_is_none(scene: Scene):
    await scene.add("r1", session_id="s" * 300)
    await scene.add("r2", session_id="")
    assert [message.session for message in scene.failover.submitted] == ["s" * 256, None]


async def test_the_deltas_of_one_step_leave_in_one_frame(scene: Scene):
    for request_id in ("r1", "r2", "r3"):
        await scene.add(request_id)
    scene.core.on_deltas(
        [
            TokenDelta("r1", [7]),
            TokenDelta("r2", [8], prefill=PrefillCounts(3, 2, 0, 0.0, 0.0, 2)),
            TokenDelta("r3", [9, 10], finish_reason="stop", stop_reason=10),
        ]
    )
    [step] = scene.steps()
    first, second, third = step.outputs
    assert (first.request_id, first.new_token_ids, first.finish_reason) == ("r1", [7], None)
    assert second.prefill_stats is not None and second.prefill_stats.num_cached_tokens == 2
    assert (third.new_token_ids, third.finish_reason, third.stop_reason) == ([9, 10], 0, 10)
    assert step.timestamp > 0 and scene.core.in_flight == 2


async def test_log_probabilities_arrive_as_arrays(scene: Scene):
    await scene.add("r1")
    rows = LogprobRows(
        rows=1,
        width=2,
        token_ids=np.array([7, 9], "<i8").tobytes(),
        logprobs=np.array([-0.5, -1.5], "<f4").tobytes(),
        ranks=np.array([1], "<i8").tobytes(),
    )
    scene.core.on_deltas([TokenDelta("r1", [7], logprobs=rows, prompt_logprobs=rows)])
    [step] = scene.steps()
    [output] = step.outputs
    assert output.new_logprobs is not None and output.new_prompt_logprobs_tensors is not None
    assert np.array_equal(output.new_logprobs.logprobs, [[-0.5, -1.5]])
    assert output.new_prompt_logprobs_tensors.logprob_token_ids.tolist() == [[7, 9]]


async def test_refusals_and_losses_end_requests_with_an_error():
    scene = Scene(in_flight=1)
    scene.failover.refusal = NoWorkers("none")
    await scene.add("r1")
    scene.failover.refusal = None
    await scene.add("r2")
    await scene.add("r3")
    assert scene.ends() == {"r1": FinishReason.ERROR, "r3": FinishReason.ERROR}
    assert scene.refused == {"no_worker": 1, "limit": 1}
    scene.core.on_ended("r2", WorkerLost("gone"))
    assert scene.ends() == {"r2": FinishReason.ERROR} and scene.core.in_flight == 0


async def test_requests_that_cannot_be_served_are_refused_alone(scene: Scene):
    await scene.add("r1", sampling_params=None)
    request_id = "r2"
    scene.core.take([b"\x00", msgspec.msgpack.encode([request_id, "not a prompt", None, None])])
    await scene.add("x" * 300)
    await scene.add("image", mm_features=[feature(0, 2, data=None)])
    await scene.add("r3")
    refused = ("r1", "r2", "x" * 300, "image")
    assert scene.ends() == dict.fromkeys(refused, FinishReason.ERROR)
    assert scene.failover.submitted_ids == ["r3"]


async def test_an_abort_frame_cancels_at_the_worker(scene: Scene):
    await scene.add("r1")
    await scene.add("r2")
    await scene.take(EngineCoreRequestType.ABORT, ["r1", "unknown"])
    assert scene.failover.aborted == ["r1", "unknown"]
    assert scene.core.in_flight == 1 and scene.sent == []


async def test_an_abort_right_behind_its_request_comes_after_it(scene: Scene):
    order: list[str] = []

    async def submit(message: GenerateRequest, movable: MigrationPlan) -> None:
        order.append(f"submit {message.request_id}")

    async def abort(request_ids: Sequence[str]) -> None:
        order.extend(f"abort {request_id}" for request_id in request_ids)

    scene.failover.submit, scene.failover.abort = submit, abort  # type: ignore[method-assign]
    adding = asyncio.create_task(scene.add("r1"))
    await asyncio.sleep(0)
    await scene.take(EngineCoreRequestType.ABORT, ["r1"])
    await adding
    assert order == ["submit r1", "abort r1"]


async def test_a_malformed_delta_ends_its_request_and_no_other(scene: Scene):
    await scene.add("r1")
    await scene.add("r2")
    scene.core.on_deltas([TokenDelta("r1", [], finish_reason="nonsense"), TokenDelta("r2", [7])])
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert scene.ends() == {"r1": FinishReason.ERROR, "r2": None}
    assert scene.failover.aborted == ["r1"]


async def test_a_grammar_is_checked_before_a_worker_has_it():
    async def check(params: SamplingParams) -> None:
        assert params.structured_outputs is not None
        if params.structured_outputs.regex == "(":
            raise VLLMValidationError("no regex")
        params.structured_outputs._backend = "chosen"

    scene = Scene(check=check)
    bad = SamplingParams(structured_outputs=StructuredOutputsParams(regex="("))
    await scene.add("r1", sampling_params=bad)
    await scene.add("r2", sampling_params=grammar())
    [message] = scene.failover.submitted
    checked = sampling_from_bytes(message.sampling).structured_outputs
    assert message.request_id == "r2" and checked is not None and checked._backend == "chosen"
    assert scene.ends() == {"r1": FinishReason.ERROR} and scene.core.in_flight == 1


async def test_a_request_aborted_while_its_grammar_is_checked_reaches_no_worker():
    ended: list[str] = []

    async def check(params: SamplingParams) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("check")

    scene = Scene(check=check)
    await scene.add("r1", sampling_params=grammar())
    await scene.take(EngineCoreRequestType.ABORT, ["r1"])
    assert ended == ["check"] and scene.failover.submitted == [] and scene.sent == []


async def test_requests_whose_grammar_is_being_checked_count_as_admitted():
    go_on = asyncio.Event()

    async def check(params: SamplingParams) -> None:
        await go_on.wait()

    scene = Scene(in_flight=1, check=check)
    await scene.add("r1", sampling_params=grammar())
    assert scene.core.in_flight == 1
    await scene.add("r2", sampling_params=grammar())
    assert scene.ends() == {"r2": FinishReason.ERROR} and scene.refused == {"limit": 1}
    go_on.set()
    await eventually(lambda: scene.failover.submitted_ids == ["r1"])
    assert scene.core.in_flight == 1


async def test_a_request_whose_time_ends_while_its_grammar_is_checked_is_late():
    async def check(params: SamplingParams) -> None:
        await asyncio.Event().wait()

    scene = Scene(check=check, timeout_s=0.01)
    await scene.add("r1", sampling_params=grammar())
    await eventually(lambda: scene.ends() == {"r1": FinishReason.ERROR})
    assert scene.refused == {"late": 1} and scene.failover.submitted == []


async def test_what_only_an_engine_can_do_is_refused(scene: Scene):
    await scene.take(EngineCoreRequestType.UTILITY, [0, 17, "sleep", [1]])
    [step] = scene.steps()
    assert step.utility_output is not None and step.utility_output.call_id == 17
    assert "sleep is not served here" in (step.utility_output.failure_message or "")


async def test_a_traced_request_has_one_span_without_a_parent():
    recorder = Tracing()
    scene = Scene(tracer=recorder)
    await scene.add("r1")
    [message] = scene.failover.submitted
    assert message.trace_headers is not None
    scene.core.on_deltas([TokenDelta("r1", [7], finish_reason="length")])
    span = recorder.named("generate")
    assert span.parent == "" and span.context.span_id in message.trace_headers["traceparent"]


async def test_nothing_is_sent_after_the_end(scene: Scene):
    async with scene.core:
        await scene.add("r1")
    scene.core.on_deltas([TokenDelta("r1", [7])])
    assert scene.sent == []
