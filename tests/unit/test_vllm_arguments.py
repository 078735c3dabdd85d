"""The check of vLLM's arguments, and the files in which its verdicts are kept."""

import json
from pathlib import Path
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


def mistakes(cache: Path, **flags: dict[str, Any]) -> list[str]:
    """Of a graph with these services."""
    services = [
        SimpleNamespace(service=SimpleNamespace(name=name, flags="engine"), flags=given)
        for name, given in flags.items()
    ]
    config: Any = SimpleNamespace(services=services)
    document = Document(source="x.yaml")
    check_vllm_arguments(config, document, cache)
    return document.mistakes


def test_a_cache_that_cannot_be_written_is_no_trouble(tmp_path: Path, asked: list[Any]):
    (tmp_path / "file").touch()
    found = mistakes(tmp_path / "file" / "verdicts", Back={"seed": "x"})
    assert found == ["x.yaml: Back.seed: no number"]
    assert len(asked) == 1


def test_each_section_is_judged_once_for_all_graphs(tmp_path: Path, asked: list[Any]):
    def judged(**seeds: Any) -> list[str]:
        flags = {name: {"seed": seed} for name, seed in seeds.items()}
        return mistakes(tmp_path / "verdicts", **flags)

    assert judged(Back=1, Front=2) == []
    assert judged(Front=2) == judged(Other=1, Back=2) == []
    assert [list(question) for question in asked] == [["Back", "Front"]]
    assert judged(Back=1, Front="x") == ["x.yaml: Front.seed: no number"]
    assert [list(question) for question in asked[1:]] == [["Front"]]
    assert judged(Other="x", Back=1) == ["x.yaml: Other.seed: no number"]
    assert len(asked) == 2


def test_a_mapping_may_have_keys_that_are_numbers(tmp_path: Path, asked: list[Any]):
    flags = {"hf-overrides": {"id2label": {0: "a", "other": "b", True: "c"}}}
    assert mistakes(tmp_path / "verdicts", Back=flags) == []


def test_a_vllm_that_was_not_tried_is_refused(
    tmp_path: Path, asked: list[Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(vllm_arguments, "vllm_version", lambda: "vllm 0.29.0")
    with pytest.raises(StartupError, match=r"vllm 0\.29\.0 was not tried .*--allow-untested-vllm"):
        mistakes(tmp_path, Back={})
    assert asked == []
