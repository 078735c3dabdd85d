from datetime import date

import pytest

from dynamo_lite.vllm.args import engine_flags


@pytest.mark.parametrize(
    ("args", "flags"),
    [
        ({"enforce-eager": True}, ["--enforce-eager"]),
        ({"enforce-eager": False}, ["--no-enforce-eager"]),
        ({"max-model-len": 4096}, ["--max-model-len=4096"]),
        ({"chat-template": "-x"}, ["--chat-template=-x"]),
        ({"hf-overrides": {"a": [1, True]}}, ["--hf-overrides", '{"a": [1, true]}']),
        ({"hf-overrides": {"a": date(2026, 1, 2)}}, ["--hf-overrides", '{"a": "2026-01-02"}']),
        ({"lora": [{"a": date(2026, 1, 2)}]}, ["--lora", '{"a": "2026-01-02"}']),
        ({"served-model-name": ["a", "b"]}, ["--served-model-name", "a", "b"]),
        ({"seed": None}, []),
    ],
)
def test_flags(args: dict[str, object], flags: list[str]):
    assert engine_flags(args) == flags
