"""Which vLLM requests' first tokens a prefill engine can sample."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import RepetitionDetectionParams, SamplingParams, StructuredOutputsParams
from vllm.v1.request import Request

from dynamo_lite.disagg.transfer_params import PrefillJobParams, decode_params_of, unpack
from dynamo_lite.protocol.errors import Refused
from dynamo_lite.protocol.prefill import FirstTokenWanted
from dynamo_lite.runtime.claim_cells import Cell
from dynamo_lite.vllm import first_token, requests
from dynamo_lite.vllm.first_token import FirstTokenRules, stop_tokens
from tests.builders import engine_metadata, prefill_job
from tests.vllm.without_engines.test_requests import MODEL, message

LIMIT = MODEL.max_model_len


def rules(
    monkeypatch: pytest.MonkeyPatch, *, cpu: bool = False, one_group: bool = True, **changes: Any
) -> FirstTokenRules:
    """Of an engine; changes: of its configuration."""
    platform = SimpleNamespace(is_cpu=lambda: cpu)
    monkeypatch.setattr(first_token, "current_platform", platform)
    cache = SimpleNamespace(sliding_window=None)
    fields = {"model_config": MODEL, "cache_config": cache}
    config: Any = SimpleNamespace(**(fields | changes))
    return FirstTokenRules(config, one_group=one_group)


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0, "max_tokens": 8} | fields))


def changed(model: Any, **fields: Any) -> Any:
    return SimpleNamespace(**(vars(model) | fields))


@pytest.mark.parametrize(
    "fields",
    [{}, {"seed": 3}, {"stop": ["x"], "stop_token_ids": [5], "ignore_eos": True}],
    ids=str,
)
def test_greedy_requests_get_it_from_the_prefill_engine(monkeypatch, fields):
    assert rules(monkeypatch).asks(params(**fields), 5)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 1},
        {"temperature": 1.0},
        {"temperature": 0.5, "seed": 3},
        {"logprobs": 0},
        {"logprob_token_ids": [1]},
        {"prompt_logprobs": 0},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"repetition_penalty": 1.1},
        {"logit_bias": {3: 1.0}},
        {"allowed_token_ids": [3]},
        {"bad_words": ["x"]},
        {"min_tokens": 1},
        {"structured_outputs": StructuredOutputsParams(json={"type": "object"})},
        {"thinking_token_budget": 5},
        {"repetition_detection": RepetitionDetectionParams(max_pattern_size=3, min_count=2)},
        {"trace_decode_token_ids": [3]},
        {"extra_args": {"mine": 1}},
    ],
    ids=str,
)
def test_all_others_are_not(monkeypatch, fields):
    assert not rules(monkeypatch).asks(params(**fields), 5)


def test_a_first_token_that_is_the_last_one_the_model_takes_is_not(monkeypatch):
    here = rules(monkeypatch)
    assert here.asks(params(), LIMIT - 2) and not here.asks(params(), LIMIT - 1)
    assert here.gives(LIMIT - 1) and not here.gives(LIMIT)


@pytest.mark.parametrize(
    "config",
    [
        {"model_config": changed(MODEL, logits_processors=["mine.Processor"])},
        {"model_config": changed(MODEL, is_diffusion=True)},
        {"cache_config": SimpleNamespace(sliding_window=128)},
        {"one_group": False},
    ],
    ids=["logits processor", "not causal", "frees blocks early", "several KV groups"],
)
def test_engines_of_these_kinds_take_and_give_none(monkeypatch, config):
    here = rules(monkeypatch, **config)
    assert not here.asks(params(), 5) and not here.gives(5)


def test_mla_on_a_cpu_computes_prompts_and_decoded_tokens_differently(monkeypatch):
    mla = changed(MODEL, use_mla=True)
    on_cpu = rules(monkeypatch, cpu=True, model_config=mla)
    assert not on_cpu.asks(params(), 5) and not on_cpu.gives(5)
    assert rules(monkeypatch, model_config=mla).gives(5)


def test_installed_logits_processors_count(monkeypatch):
    monkeypatch.setattr(first_token, "entry_points", lambda group: [group])
    assert not rules(monkeypatch).asks(params(), 5)


def test_which_tokens_end_an_answer():
    ends = params(stop_token_ids=[5, 6])
    assert stop_tokens(ends) == {5, 6}
    ends.update_from_generation_config({"eos_token_id": [2, 3]}, eos_token_id=2)
    assert stop_tokens(ends) == {2, 3, 5, 6}
    ends = params(ignore_eos=True)
    ends.update_from_generation_config({"eos_token_id": [2, 3]}, eos_token_id=2)
    assert stop_tokens(ends) == set()


@pytest.mark.parametrize("timed", [False, True])
def test_the_engines_scheduler_half_knows_it(timed: bool):
    made = requests.generation(message(temperature=0), MODEL, connected=timed)
    assert not decode_params_of(Request.from_engine_core_request(made, None)).first_token
    requests.ask_first_token(made)
    assert decode_params_of(Request.from_engine_core_request(made, None)).first_token


def job(last_token_id: int = 99) -> Any:
    return prefill_job(first_token=FirstTokenWanted(last_token_id=last_token_id))


def test_a_prefill_engine_computes_the_whole_prompt_where_it_gives_the_token():
    target = engine_metadata(num_blocks=9)
    made = requests.prefill(job(), target, Cell(), MODEL, first_token=True)
    assert made.prompt_token_ids == [*range(10), 99]
    assert (made.params.temperature, made.params.max_tokens) == (0, 1)
    sent = unpack(Request.from_engine_core_request(made, None), PrefillJobParams)
    assert sent is not None and sent.num_tokens == 10
    for without in (
        requests.prefill(job(), target, Cell(), MODEL),
        requests.prefill(prefill_job(), target, Cell(), MODEL, first_token=True),
    ):
        assert without.prompt_token_ids == list(range(10))


def test_a_last_token_that_would_break_a_step_is_refused():
    with pytest.raises(Refused, match="vocabulary"):
        requests.prefill(job(100), engine_metadata(), Cell(), MODEL, first_token=True)
