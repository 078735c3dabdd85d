"""Which vLLM sampling parameters allow a migration, and how."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import vllm
from vllm.model_executor.models import ModelRegistry
from vllm.sampling_params import RepetitionDetectionParams, SamplingParams, StructuredOutputsParams

from dynamo_lite.request_plane.migrating_request import MigrationPlan
from dynamo_lite.vllm.migratable import is_causal, migration_plan

GRAMMAR = {"structured_outputs": StructuredOutputsParams(json={"type": "object"})}

CONTINUE, REPLAY = MigrationPlan(), MigrationPlan(replay=True)
#: The texts are in error messages.
STAY_UNDER_A_GRAMMAR = MigrationPlan(
    stay="random without a seed under a grammar, whose state cannot migrate"
)
STAY_NOT_CAUSAL = MigrationPlan(stay="random without a seed, and the model is not causal")


def bad_words(*words: list[int]) -> SamplingParams:
    params = SamplingParams(temperature=0, bad_words=["x"] * len(words))
    params._bad_words_token_ids = list(words)
    return params


@pytest.mark.parametrize(
    ("params", "plan"),
    [
        (SamplingParams(temperature=0), CONTINUE),
        (SamplingParams(temperature=0, seed=7), CONTINUE),
        (SamplingParams(temperature=0, logprobs=3, prompt_logprobs=2, min_tokens=4), CONTINUE),
        (SamplingParams(temperature=0, logit_bias={3: 1.0}, allowed_token_ids=[3]), CONTINUE),
        (SamplingParams(temperature=0, stop=["x"], stop_token_ids=[9]), CONTINUE),
        # Prompt and output count alike.
        (SamplingParams(temperature=0, repetition_penalty=1.2), CONTINUE),
        (bad_words([5], [6]), CONTINUE),
        (SamplingParams(temperature=1), CONTINUE),
        (SamplingParams(temperature=1, presence_penalty=0.5), CONTINUE),
        (SamplingParams(temperature=0, presence_penalty=0.5), REPLAY),
        (SamplingParams(temperature=0, frequency_penalty=-0.5), REPLAY),
        (bad_words([5], [6, 7]), REPLAY),
        (SamplingParams(temperature=0, bad_words=["not tokenised"]), REPLAY),
        (SamplingParams(temperature=0, **GRAMMAR), REPLAY),
        (SamplingParams(temperature=0, thinking_token_budget=5), REPLAY),
        (
            SamplingParams(
                temperature=0,
                repetition_detection=RepetitionDetectionParams(max_pattern_size=3, min_count=2),
            ),
            REPLAY,
        ),
        (SamplingParams(temperature=0, extra_args={"mine": 1}), REPLAY),
        (SamplingParams(temperature=1, seed=7), REPLAY),
        (SamplingParams(temperature=1, seed=7, presence_penalty=0.5, **GRAMMAR), REPLAY),
        (SamplingParams(temperature=1, **GRAMMAR), STAY_UNDER_A_GRAMMAR),
        (SamplingParams(temperature=1, presence_penalty=0.5, **GRAMMAR), STAY_UNDER_A_GRAMMAR),
    ],
    ids=str,
)
def test_how_a_request_goes_on(params: SamplingParams, plan: MigrationPlan):
    assert migration_plan(params) == plan


def test_each_of_several_choices_has_a_seed_of_its_own():
    """vLLM gives child i of a seeded request the seed plus i: each replays by itself."""
    from vllm.v1.engine.parallel_sampling import ParentRequest

    from tests.vllm.without_engines.test_requests import core_request

    parent = ParentRequest(core_request(SamplingParams(temperature=1, n=3, seed=7)))
    children = [parent.get_child_info(index)[1] for index in range(3)]
    assert [child.seed for child in children] == [7, 8, 9]
    assert all(migration_plan(child) == REPLAY for child in children)


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
    assert migration_plan(SamplingParams(temperature=0), causal=False) == REPLAY
    assert migration_plan(SamplingParams(temperature=1, seed=7), causal=False) == REPLAY
    assert migration_plan(SamplingParams(temperature=1), causal=False) == STAY_NOT_CAUSAL
