"""vLLM's requests to messages and back: what an engine is given after a move."""

import math
import time
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from vllm import SamplingParams
from vllm.config import ModelConfig, SpeculativeConfig
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request

from dynamo_lite.disagg.transfer_params import decode_params_of
from dynamo_lite.protocol.errors import Refused
from dynamo_lite.protocol.generate import Adapter, GenerateRequest
from dynamo_lite.request_plane.migrating_request import MigrationPlan
from dynamo_lite.runtime.claim_cells import Cell
from dynamo_lite.vllm.requests import generate_request, generation, prefill
from dynamo_lite.vllm.wire import sampling_to_bytes
from tests.builders import engine_metadata, prefill_job

MAX_MODEL_LEN = 64

MODEL = cast(
    "ModelConfig",
    SimpleNamespace(
        max_model_len=MAX_MODEL_LEN,
        max_logprobs=20,
        logits_processors=None,
        is_diffusion=False,
        use_mla=False,
        architectures=["LlamaForCausalLM"],
        get_vocab_size=lambda: 100,
    ),
)


def core_request(params: SamplingParams, **other: Any) -> EngineCoreRequest:
    fields: dict[str, Any] = {
        "request_id": "r",
        "external_req_id": "r",
        "prompt_token_ids": [1, 2, 3],
        "mm_features": None,
        "sampling_params": params,
        "pooling_params": None,
        "arrival_time": 5.0,
        "lora_request": None,
        "cache_salt": "salt",
        "data_parallel_rank": None,
    }
    return EngineCoreRequest(**(fields | other))


def message(output: list[int] | None = None, **params: Any) -> GenerateRequest:
    sent, _ = generate_request(core_request(SamplingParams(**params)), 2.5)
    return msgspec.structs.replace(sent, output_token_ids=output or [])


def test_prompt_logprobs_that_no_connection_takes_are_refused_before_the_work():
    params = SamplingParams(temperature=0, prompt_logprobs=20)
    model = cast("ModelConfig", SimpleNamespace(**vars(MODEL) | {"max_model_len": 300_000}))
    for tokens, fits in ((131_072, True), (200_000, False)):
        sent, _ = generate_request(core_request(params, prompt_token_ids=[1] * tokens), 2.5)
        if fits:
            generation(sent, model)
            continue
        with pytest.raises(Refused, match="ask for fewer"):
            generation(sent, model)


def test_prompt_logprobs_of_the_whole_vocabulary_are_limited_by_its_size(monkeypatch):
    whole = message(prompt_logprobs=-1)
    model = SimpleNamespace(**vars(MODEL) | {"max_logprobs": -1})
    assert generation(whole, cast("ModelConfig", model)).params.prompt_logprobs == -1
    model.get_vocab_size = lambda: 40_000_000
    with pytest.raises(Refused, match=r"prompt_logprobs of 40000000 .*ask for fewer"):
        generation(whole, cast("ModelConfig", model))


@pytest.mark.parametrize("params", [{"min_p": 0.1}, {"logit_bias": {3: 1.0}}])
def test_what_an_engine_with_drafts_would_ignore_is_refused(params: dict[str, Any]):
    """Only it knows of its drafts."""
    generation(message(**params), MODEL)
    with pytest.raises(Refused, match="not yet supported with speculative decoding") as refused:
        generation(message(**params), MODEL, speculation=cast("SpeculativeConfig", object()))
    assert not refused.value.elsewhere


def test_a_request_arrives_as_it_was():
    sent, plan = generate_request(core_request(SamplingParams(temperature=0)), 2.5)
    assert sent.timeout_s == 2.5 and plan == MigrationPlan()
    got = generation(sent, MODEL)
    assert got.prompt_token_ids == [1, 2, 3] and got.cache_salt == "salt"
    assert got.sampling_params == SamplingParams(temperature=0)


@pytest.mark.parametrize(
    "changes",
    [
        {"sampling_params": None},
        {"mm_features": [object()]},
        {"resumable": True},
        {"request_id": "x" * 250},
        {"request_id": "a\nb"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_cannot_travel_is_the_clients_mistake(changes: dict[str, Any]):
    request = core_request(SamplingParams(), **changes)
    with pytest.raises(VLLMValidationError):
        generate_request(request, None)


def test_generated_tokens_go_into_the_prompt_and_out_of_the_limits():
    got = generation(message([4, 5], max_tokens=10, min_tokens=6, temperature=0), MODEL)
    assert got.prompt_token_ids == [1, 2, 3, 4, 5]
    assert (got.params.max_tokens, got.params.min_tokens) == (8, 4)
    got = generation(message([4, 5], max_tokens=10, min_tokens=1, temperature=0), MODEL)
    assert got.params.min_tokens == 0


def test_a_connector_knows_how_much_time_is_left():
    sent = message([4, 5], temperature=0, extra_args={"mine": 1})
    before = time.monotonic()
    got = Request.from_engine_core_request(generation(sent, MODEL, connected=True), None)
    assert 2.4 < decode_params_of(got).time_left_s(before) < 3.0
    assert got.sampling_params.extra_args["mine"] == 1
    for untimed in (
        generation(sent, MODEL),
        generation(msgspec.structs.replace(sent, timeout_s=None), MODEL, connected=True),
    ):
        request = Request.from_engine_core_request(untimed, None)
        assert decode_params_of(request).time_left_s(before) == math.inf


def test_an_adapter_travels_to_the_engine_and_on_to_a_prefill_worker():
    asked = core_request(SamplingParams(), lora_request=LoRARequest("a", 7, "/adapters/a"))
    sent, _ = generate_request(asked, None)
    assert sent.adapter == Adapter(name="a", path="/adapters/a")
    loaded = msgspec.structs.replace(sent.adapter, digest="d"), LoRARequest("a", 2, "/adapters/a")
    got = Request.from_engine_core_request(
        generation(sent, MODEL, connected=True, loaded=loaded), None
    )
    assert got.lora_request.lora_int_id == 2
    assert decode_params_of(got).adapter == loaded[0]
    assert decode_params_of(got).time_left_s(time.monotonic()) == math.inf


def test_without_a_limit_the_models_length_is_it():
    got = generation(message([4, 5], max_tokens=None), MODEL)
    assert got.params.max_tokens == MAX_MODEL_LEN - 5


def test_what_was_asked_about_the_prompt_is_not_asked_again():
    fresh = generation(message(prompt_logprobs=2, logprobs=3), MODEL).params
    assert (fresh.prompt_logprobs, fresh.skip_reading_prefix_cache) == (2, True)
    moved = generation(message([4], prompt_logprobs=2, logprobs=3), MODEL).params
    assert (moved.prompt_logprobs, moved.skip_reading_prefix_cache) == (None, False)
    assert moved.logprobs == 3


@pytest.mark.parametrize(
    ("output", "max_tokens", "words"),
    [
        ([4, 5], 2, "no tokens left: 2 of 2 were generated"),
        ([4] * (MAX_MODEL_LEN - 3), 100, "this model takes"),
        ([100], 10, "vocabulary"),
    ],
)
def test_output_that_leaves_nothing_to_do_is_refused(output, max_tokens, words):
    with pytest.raises(Refused, match=words) as refused:
        generation(message(output, max_tokens=max_tokens), MODEL)
    assert not refused.value.elsewhere


def test_output_never_becomes_the_prompt_of_a_model_that_is_not_causal():
    facts = {**vars(MODEL), "architectures": ["HrmTextForCausalLM"]}
    model = cast("ModelConfig", SimpleNamespace(**facts))
    with pytest.raises(Refused, match="the model is not causal"):
        generation(message([4, 5]), model)
    assert generation(message(), model).prompt_token_ids == [1, 2, 3]


def test_output_without_a_prompt_is_refused():
    import msgspec

    forged = msgspec.structs.replace(message([4]), prompt_token_ids=[])
    with pytest.raises(Refused, match="prompt of 0 tokens"):
        generation(forged, MODEL)


def test_a_salt_keeps_prompts_apart_wherever_they_are_prefilled():
    """By vLLM's hashes, which both engines' caches and single flight go by."""
    init_none_hash(sha256)
    hasher = get_request_block_hasher(4, sha256)

    def hashes(salt: str | None) -> tuple[list[Any], list[Any]]:
        """Of a prompt at its decode engine, and of the job that it becomes."""
        prompt = list(range(8))
        asked = GenerateRequest(
            request_id="r1",
            prompt_token_ids=prompt,
            sampling=sampling_to_bytes(SamplingParams()),
            arrival_time=0.0,
            cache_salt=salt,
        )
        job = prefill_job(
            prompt_token_ids=prompt, num_computed_tokens=0, block_ids=[1, 2], cache_salt=salt
        )
        target = engine_metadata(num_blocks=4)
        made = (generation(asked, MODEL), prefill(job, target, Cell(), MODEL))
        here, there = (Request.from_engine_core_request(each, hasher) for each in made)
        return list(here.block_hashes), list(there.block_hashes)

    plain, salted, other = hashes(None), hashes("a"), hashes("b")
    for here, there in (plain, salted, other):
        assert here == there and len(here) == 2
    assert not set(plain[0]) & set(salted[0]) and not set(salted[0]) & set(other[0])
