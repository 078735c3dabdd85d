"""Conversions between vLLM's engine types and our messages, without an engine."""

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput, FinishReason
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.errors import ProtocolError
from dynamo_lite.protocol.generate import (
    Deltas,
    LogprobRows,
    PrefillCounts,
    TokenDelta,
    decode_worker_frame,
)
from dynamo_lite.vllm.wire import (
    delta_from_output,
    output_from_delta,
    sampling_from_bytes,
    sampling_to_bytes,
)


def over_the_wire(delta: TokenDelta) -> TokenDelta:
    frame = decode_worker_frame(encode(Deltas(deltas=[delta])))
    assert isinstance(frame, Deltas)
    return frame.deltas[0]


def test_sampling_parameters_survive():
    params = SamplingParams(
        temperature=0.5,
        top_k=7,
        seed=3,
        stop=["x", "yy"],
        stop_token_ids=[9],
        logprobs=3,
        logit_bias={3: 1.5},
        structured_outputs=StructuredOutputsParams(json={"type": "object"}),
        output_kind=RequestOutputKind.DELTA,
        extra_args={"mine": [1, "two"]},
    )
    params.update_from_generation_config({"eos_token_id": [11, 12]}, 11)
    again = sampling_from_bytes(sampling_to_bytes(params))
    assert again == params
    assert again.all_stop_token_ids == {9, 11, 12}
    assert again.eos_token_id == 11


def test_a_client_cannot_steer_the_kv_connector():
    params = SamplingParams(extra_args={"kv_transfer_params": {"do": "harm"}, "mine": 1})
    assert sampling_from_bytes(sampling_to_bytes(params)).extra_args == {"mine": 1}
    alone = SamplingParams(extra_args={"kv_transfer_params": {"do": "harm"}})
    assert sampling_from_bytes(sampling_to_bytes(alone)).extra_args is None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x90",
        b"\x81\xa1n\xa1x",  # {"n": "x"}
        b"\x81\xa1n\x00",  # {"n": 0}, refused by vLLM itself
        b"\x81\xb8prompt_logprob_token_ids\x91\x91\x01",
    ],
)
def test_bad_sampling_bytes_are_a_protocol_error(data):
    with pytest.raises(ProtocolError):
        sampling_from_bytes(data)


def test_sampling_parameters_that_cannot_travel_are_refused():
    with pytest.raises(ProtocolError, match="is unsupported"):
        sampling_to_bytes(SamplingParams(extra_args={"array": np.zeros(2)}))


def test_a_plain_token():
    output = EngineCoreOutput(request_id="r", new_token_ids=[5])
    delta = delta_from_output(output)
    assert delta == TokenDelta(request_id="r", token_ids=[5])
    again = output_from_delta(over_the_wire(delta), now=1.0)
    assert again == output and not again.finished


@pytest.mark.parametrize("reason", list(FinishReason))
def test_every_way_to_finish(reason):
    output = EngineCoreOutput(
        request_id="r", new_token_ids=[5], finish_reason=reason, stop_reason=5
    )
    delta = delta_from_output(output)
    assert delta.finish_reason == str(reason)
    again = output_from_delta(over_the_wire(delta), now=1.0)
    assert again.finish_reason is reason and again.stop_reason == 5


def test_why_an_engine_has_ended_a_request_is_sent():
    """By vLLM 0.33; its class stands here as its fields."""

    class Output(EngineCoreOutput):
        error: Any = None

    output = Output(
        request_id="r",
        new_token_ids=[],
        finish_reason=FinishReason.ERROR,
        error=SimpleNamespace(code="engine_paused", message="paused" * 1000, retryable=True),
    )
    delta = over_the_wire(delta_from_output(output))
    assert delta.error is not None
    assert (delta.error.invalid, delta.error.retryable) == (False, True)
    assert delta.error.message == ("paused" * 1000)[:4096]
    output.error.code = "validation_error"
    assert delta_from_output(output).error == msgspec.structs.replace(delta.error, invalid=True)


def test_prefill_counts_and_times_move_to_the_readers_clock():
    stats = PrefillStats()
    stats.set(100, 32, 60)
    stats.num_cached_tokens = 40  # the prefill worker has computed the others
    stats.finalize(96)
    output = EngineCoreOutput(
        request_id="r",
        new_token_ids=[5],
        prefill_stats=stats,
        events=[
            EngineCoreEvent(EngineCoreEventType.QUEUED, 10.0),
            EngineCoreEvent(EngineCoreEventType.SCHEDULED, 10.5),
        ],
    )
    delta = delta_from_output(output, timestamp=12.0)
    assert delta.prefill == PrefillCounts(100, 32, 60, 0.5, 1.5, 40, 56)
    again = output_from_delta(over_the_wire(delta), now=1000.0)
    assert again.prefill_stats == stats
    assert again.events is not None
    assert [event.timestamp for event in again.events] == [998.0, 998.5]


def test_logprobs_of_every_kind():
    ids = np.array([[5, 6, 7], [8, 9, 10]], dtype=np.int32)
    values = np.array([[-0.5, -1.25, -np.inf], [-0.1, -2.0, -3.0]], dtype=np.float32)
    ranks = np.array([1, 2], dtype=np.int64)
    output = EngineCoreOutput(
        request_id="r",
        new_token_ids=[5, 8],
        new_logprobs=LogprobsLists(ids, values, ranks),
        new_prompt_logprobs_tensors=LogprobsTensors(
            torch.from_numpy(ids), torch.from_numpy(values), torch.from_numpy(ranks)
        ),
    )
    again = output_from_delta(over_the_wire(delta_from_output(output)), now=1.0)
    assert again.new_logprobs is not None and again.new_prompt_logprobs_tensors is not None
    for sent, got in zip((ids, values, ranks), again.new_logprobs[:3], strict=True):
        assert np.array_equal(sent, got)
    for sent, got in zip((ids, values, ranks), again.new_prompt_logprobs_tensors[:3], strict=True):
        assert np.array_equal(sent, got.numpy())


@pytest.mark.parametrize(
    "delta",
    [
        TokenDelta(request_id="r", token_ids=[], finish_reason="bored"),
        TokenDelta(request_id="r", token_ids=[], prefill=PrefillCounts(1, 1, 1)),
        TokenDelta(request_id="r", token_ids=[], prefill=PrefillCounts(1, -2, 0)),
        TokenDelta(request_id="r", token_ids=[], prefill=PrefillCounts(1, 0, 0, 0.0, 0.0, 2)),
        TokenDelta(request_id="r", token_ids=[1], logprobs=LogprobRows(1, 2, b"", b"", b"")),
        TokenDelta(request_id="r", token_ids=[1], logprobs=LogprobRows(-1, -1, b"", b"", b"")),
    ],
)
def test_a_delta_that_makes_no_sense_is_a_protocol_error(delta):
    with pytest.raises(ProtocolError):
        output_from_delta(delta, now=1.0)
