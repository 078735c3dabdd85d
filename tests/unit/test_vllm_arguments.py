"""The check of vLLM's arguments."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.serve import vllm_arguments
from dynamo_lite.serve.document import Document
from dynamo_lite.serve.vllm_arguments import check_vllm_arguments


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What vLLM's parsers are asked, which take any seed but x."""
    questions: list[dict[str, Any]] = []

    def ask(question: str) -> list[Any]:
        questions.append(json.loads(question))
        return [
            {"section": name, "key": "seed", "message": "no number", "nearest": []}
            for name, section in questions[-1].items()
            if section["args"].get("seed") == "x"
        ]

    monkeypatch.setattr(vllm_arguments, "_ask_vllm", ask)
    monkeypatch.setattr(vllm_arguments, "vllm_version", lambda: "vllm 0.32.0")
    return questions


def mistakes(**flags: dict[str, Any]) -> list[str]:
    """Of a graph with these services."""
    services = [
        SimpleNamespace(service=SimpleNamespace(name=name, flags="engine"), flags=given)
        for name, given in flags.items()
    ]
    config: Any = SimpleNamespace(services=services)
    document = Document(source="x.yaml")
    check_vllm_arguments(config, document)
    return document.mistakes


def test_a_mistake_is_that_of_its_section(asked: list[Any]):
    assert mistakes(Back={"seed": 1}, Front={"seed": "x"}) == ["x.yaml: Front.seed: no number"]
    assert [list(question) for question in asked] == [["Back", "Front"]]


def test_a_mapping_may_have_keys_that_are_numbers(asked: list[Any]):
    flags = {"hf-overrides": {"id2label": {0: "a", "other": "b", True: "c"}}}
    assert mistakes(Back=flags) == []


def test_a_vllm_that_was_not_tried_is_refused(asked: list[Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(vllm_arguments, "vllm_version", lambda: "vllm 0.29.0")
    with pytest.raises(StartupError, match=r"vllm 0\.29\.0 was not tried .*--allow-untested-vllm"):
        mistakes(Back={})
    assert asked == []
