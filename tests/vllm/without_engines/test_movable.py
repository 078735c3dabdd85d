"""Which vLLM sampling parameters allow a migration, and how."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import vllm
from vllm.model_executor.models import ModelRegistry
from vllm.sampling_params import RepetitionDetectionParams, SamplingParams, StructuredOutputsParams

from dynamo_lite.request_plane.migration import Continue, Replay, Stay
from dynamo_lite.vllm.migratable import facts, is_causal, migration_plan

GRAMMAR = StructuredOutputsParams(json={"type": "object"})


def bad_words(*words: list[int]) -> SamplingParams:
    params = SamplingParams(temperature=0, bad_words=["x"] * len(words))
    params._bad_words_token_ids = list(words)
    return params


@pytest.mark.parametrize(
    ("params", "kind"),
    [
        (SamplingParams(temperature=0), Continue),
        (SamplingParams(temperature=0, seed=7), Continue),
        (SamplingParams(temperature=0, logprobs=3, prompt_logprobs=2, min_tokens=4), Continue),
        (SamplingParams(temperature=0, logit_bias={3: 1.0}, allowed_token_ids=[3]), Continue),
        (SamplingParams(temperature=0, stop=["x"], stop_token_ids=[9]), Continue),
        # Prompt and output count alike.
        (SamplingParams(temperature=0, repetition_penalty=1.2), Continue),
        (bad_words([5], [6]), Continue),
        (SamplingParams(temperature=1), Continue),
        (SamplingParams(temperature=1, presence_penalty=0.5), Continue),
        (SamplingParams(temperature=0, presence_penalty=0.5), Replay),
        (SamplingParams(temperature=0, frequency_penalty=-0.5), Replay),
        (bad_words([5], [6, 7]), Replay),
        (SamplingParams(temperature=0, bad_words=["not tokenised"]), Replay),
        (SamplingParams(temperature=0, structured_outputs=GRAMMAR), Replay),
        (SamplingParams(temperature=0, thinking_token_budget=5), Replay),
        (
            SamplingParams(
                temperature=0,
                repetition_detection=RepetitionDetectionParams(max_pattern_size=3, min_count=2),
            ),
            Replay,
        ),
        (SamplingParams(temperature=0, extra_args={"mine": 1}), Replay),
        (SamplingParams(temperature=0.8, seed=7), Replay),
        (SamplingParams(temperature=0.8, seed=7, structured_outputs=GRAMMAR), Replay),
        (SamplingParams(temperature=0.8, structured_outputs=GRAMMAR), Stay),
    ],
    ids=str,
)
def test_how_a_request_goes_on(params: SamplingParams, kind: type):
    assert isinstance(migration_plan(params), kind), facts(params)


def test_each_of_several_choices_has_a_seed_of_its_own():
    """vLLM gives child i of a seeded request the seed plus i: each replays by itself."""
    from vllm.v1.engine.parallel_sampling import ParentRequest

    from tests.vllm.without_engines.test_requests import core_request

    parent = ParentRequest(core_request(SamplingParams(temperature=1, n=3, seed=7)))
    children = [parent.get_child_info(index)[1] for index in range(3)]
    assert [child.seed for child in children] == [7, 8, 9]
    assert all(isinstance(migration_plan(child), Replay) for child in children)


def model(*architectures: str, is_diffusion: bool = False) -> Any:
    return cast("Any", SimpleNamespace(architectures=architectures, is_diffusion=is_diffusion))


def test_which_models_are_causal():
    assert is_causal(model("LlamaForCausalLM"))
    assert not is_causal(model("HrmTextForCausalLM"))
    assert not is_causal(model("DiffusionGemmaForBlockDiffusion", is_diffusion=True))


def test_every_architecture_with_prefix_lm_layers_is_known():
    """Only the source of vLLM's models shows which these are."""
    root = Path(vllm.__file__).parent
    found = set()
    for folder in ("model_executor/models", "models"):
        for source in (root / folder).rglob("*.py"):
            text = source.read_text()
            if "PrefillPrefixLMAttention(" in text:
                found.update(re.findall(r"^class (\w+)\(", text, re.MULTILINE))
    served = found & set(ModelRegistry.get_supported_archs())
    assert served
    assert [name for name in sorted(served) if is_causal(model(name))] == []


def test_tokens_of_a_model_that_is_not_causal_never_become_a_prompt():
    assert isinstance(migration_plan(SamplingParams(temperature=0), causal=False), Replay)
    assert isinstance(migration_plan(SamplingParams(temperature=1), causal=False), Stay)
