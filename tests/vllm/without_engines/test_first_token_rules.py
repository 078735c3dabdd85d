"""Which vLLM requests' first tokens a prefill engine can sample."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm.sampling_params import RepetitionDetectionParams, SamplingParams, StructuredOutputsParams
from vllm.v1.request import Request

from dynamo_lite.disagg.transfer_params import PrefillJobParams, decode_params_of, unpack
from dynamo_lite.protocol.errors import Refused
from dynamo_lite.protocol.prefill import FirstTokenSampling, FirstTokenWanted
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
    fields = {"model_config": MODEL, "cache_config": cache, "speculative_config": None}
    config: Any = SimpleNamespace(**(fields | changes))
    return FirstTokenRules(config, one_group=one_group)


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0, "max_tokens": 8} | fields))


def changed(model: Any, **fields: Any) -> Any:
    return SimpleNamespace(**(vars(model) | fields))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, FirstTokenSampling()),
        ({"seed": 3}, FirstTokenSampling()),
        ({"stop": ["x"], "stop_token_ids": [5], "ignore_eos": True}, FirstTokenSampling()),
        ({"temperature": 0.5, "seed": 3}, FirstTokenSampling(temperature=0.5, seed=3)),
        (
            {"temperature": 0.5, "seed": 3, "top_p": 0.9, "top_k": 4, "min_p": 0.2},
            FirstTokenSampling(temperature=0.5, seed=3, top_p=0.9, top_k=4, min_p=0.2),
        ),
        ({"temperature": 0.5, "seed": 3, "top_k": -1}, FirstTokenSampling(temperature=0.5, seed=3)),
    ],
    ids=str,
)
def test_greedy_and_seeded_requests_are_sampled_by_the_prefill_engine(
    monkeypatch, fields, expected
):
    assert rules(monkeypatch).sampling(params(**fields), 5) == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 1},
        {"temperature": 1.0},
        {"temperature": 1.0, "seed": 1 << 70},
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
    assert rules(monkeypatch).sampling(params(**fields), 5) is None


def test_a_first_token_that_is_the_last_one_the_model_takes_is_not(monkeypatch):
    here = rules(monkeypatch)
    assert here.sampling(params(), LIMIT - 2) is not None
    assert here.sampling(params(), LIMIT - 1) is None
    assert here.samples(FirstTokenSampling(), LIMIT - 1)
    assert not here.samples(FirstTokenSampling(), LIMIT)


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
    assert here.sampling(params(), 5) is None
    assert not here.samples(FirstTokenSampling(), 5)


def test_mla_on_a_cpu_computes_prompts_and_decoded_tokens_differently(monkeypatch):
    mla = changed(MODEL, use_mla=True)
    assert rules(monkeypatch, cpu=True, model_config=mla).sampling(params(), 5) is None
    assert not rules(monkeypatch, cpu=True, model_config=mla).samples(FirstTokenSampling(), 5)
    assert rules(monkeypatch, model_config=mla).samples(FirstTokenSampling(), 5)


def test_installed_logits_processors_count(monkeypatch):
    monkeypatch.setattr(first_token, "entry_points", lambda group: [group])
    assert rules(monkeypatch).sampling(params(), 5) is None


def test_seeded_sampling_needs_a_generator_that_both_engines_use_alike(monkeypatch):
    drawn, seeded = params(temperature=0.5, seed=3), FirstTokenSampling(temperature=0.5, seed=3)
    greedy = FirstTokenSampling()
    drafts = rules(monkeypatch, speculative_config=object())
    assert drafts.sampling(drawn, 5) is None and not drafts.samples(seeded, 5)
    assert drafts.sampling(params(), 5) == greedy and drafts.samples(greedy, 5)
    # vLLM cannot set back the generator of a CPU after a chunk of a prompt.
    on_cpu = rules(monkeypatch, cpu=True)
    assert on_cpu.sampling(drawn, 5) == seeded and not on_cpu.samples(seeded, 5)
    assert on_cpu.samples(greedy, 5)
    assert rules(monkeypatch).samples(seeded, 5)


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
    sampling = FirstTokenSampling(temperature=0.5, seed=3)
    made = requests.generation(message(temperature=0.5, seed=3), MODEL, connected=timed)
    assert decode_params_of(Request.from_engine_core_request(made, None)).first_token is None
    requests.ask_first_token(made, sampling)
    assert decode_params_of(Request.from_engine_core_request(made, None)).first_token == sampling


def job(**sampling: Any) -> Any:
    wanted = FirstTokenWanted(sampling=FirstTokenSampling(**sampling), last_token_id=99)
    return prefill_job(first_token=wanted)


def test_a_prefill_engine_computes_the_whole_prompt_and_samples():
    made = requests.prefill(
        job(temperature=0.5, top_p=0.9, top_k=4, min_p=0.2, seed=3),
        engine_metadata(num_blocks=9),
        Cell(),
        MODEL,
        first_token=True,
    )
    assert made.prompt_token_ids == [*range(10), 99]
    drawn = made.params
    assert (drawn.temperature, drawn.top_p, drawn.top_k, drawn.min_p) == (0.5, 0.9, 4, 0.2)
    assert (drawn.seed, drawn.max_tokens) == (3, 1)
    sent = unpack(Request.from_engine_core_request(made, None), PrefillJobParams)
    assert sent is not None and sent.num_tokens == 10


def test_without_it_the_last_token_is_left_to_the_decode_engine():
    target = engine_metadata(num_blocks=9)
    for made in (
        requests.prefill(job(seed=3, temperature=0.5), target, Cell(), MODEL),
        requests.prefill(prefill_job(), target, Cell(), MODEL, first_token=True),
    ):
        assert made.prompt_token_ids == list(range(10))
        assert (made.params.temperature, made.params.seed) == (0, None)


@pytest.mark.parametrize("change", [{"top_k": 2_000_000_000}, {"last_token_id": 100}], ids=str)
def test_what_the_model_cannot_take_is_refused_and_breaks_no_step(change: dict[str, Any]):
    asked = job(temperature=1.0, seed=1, **{k: v for k, v in change.items() if k == "top_k"})
    if "last_token_id" in change:
        wanted = msgspec.structs.replace(asked.first_token, **change)
        asked = msgspec.structs.replace(asked, first_token=wanted)
    try:
        made = requests.prefill(asked, engine_metadata(), Cell(), MODEL, first_token=True)
    except Refused:
        return
    # vLLM cuts top_k to the vocabulary.
    assert "top_k" in change and made.params.top_k == change["top_k"]
