"""Grammars from vLLM's Rust frontend get the verdict and the backend of vLLM's Python frontend."""

from collections.abc import Iterator
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
from vllm.tokenizers import cached_tokenizer_from_config

from dynamo_lite.vllm.frontend.grammar_check import GrammarCheck
from dynamo_lite.vllm.frontend.openai_app import frontend_config, parse_args
from tests.vllm.front_half import flags, write_model


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    return frontend_config(parse_args(flags(write_model(tmp_path_factory.mktemp("model")))))


@pytest.fixture
def grammars(config: VllmConfig) -> Iterator[GrammarCheck]:
    with GrammarCheck(config) as grammars:
        yield grammars


def asked(**constraint: Any) -> SamplingParams:
    """As `vllm-rs` sends it."""
    outputs = StructuredOutputsParams(**constraint)
    outputs._backend = "guidance"
    return SamplingParams(structured_outputs=outputs)


@pytest.mark.parametrize(
    ("constraint", "backend"),
    [
        ({"json": {"type": "object"}}, "xgrammar"),
        ({"json_object": True}, "xgrammar"),
        ({"regex": "[a-f]{3}"}, "xgrammar"),
        ({"choice": ["yes", "no"]}, "xgrammar"),
        ({"grammar": 'root ::= "a"'}, "xgrammar"),
    ],
)
async def test_the_backend_is_the_one_that_the_python_frontend_chooses(
    grammars: GrammarCheck, config: VllmConfig, constraint: dict[str, Any], backend: str
):
    params, python = asked(**constraint), SamplingParams()
    python.structured_outputs = StructuredOutputsParams(**constraint)
    tokenizer = cached_tokenizer_from_config(config.model_config)
    python.verify(config.model_config, None, config.structured_outputs_config, tokenizer)
    await grammars.check(params)
    assert params.structured_outputs == python.structured_outputs
    assert params.structured_outputs is not None
    assert params.structured_outputs._backend == backend


@pytest.mark.parametrize(
    "constraint",
    [
        {"json": "7"},
        {"json": {"type": "no type"}},
        {"json": ""},
        {"regex": "("},
        {"regex": "a\0b"},
        {"choice": []},
        {"grammar": "root ::= ("},
        {"structural_tag": "{}"},
        {"json_object": False},
        # The backend `auto` would give it to `guidance`, which another engine may not have.
        {"json": {"type": "integer", "multipleOf": 3}},
    ],
)
async def test_what_no_backend_takes_is_refused(grammars: GrammarCheck, constraint: dict[str, Any]):
    with pytest.raises(VLLMValidationError):
        await grammars.check(asked(**constraint))
