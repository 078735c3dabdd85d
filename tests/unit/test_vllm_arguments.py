"""The check of vLLM's arguments, and the file in which its verdicts are kept."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo_lite.serve import vllm_arguments
from dynamo_lite.serve.document import Document
from dynamo_lite.serve.vllm_arguments import check_vllm_arguments


def test_a_cache_that_cannot_be_written_is_no_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked: list[str] = []

    def ask(question: str) -> list[Any]:
        asked.append(question)
        return [{"section": "Back", "key": "model", "message": "too large"}]

    monkeypatch.setattr(vllm_arguments, "_ask_vllm", ask)
    monkeypatch.setattr(vllm_arguments, "vllm_version", lambda: "0.0")
    service = SimpleNamespace(service=SimpleNamespace(name="Back", flags="engine"), flags={})
    config: Any = SimpleNamespace(services=[service])
    (tmp_path / "file").touch()
    document = Document(source="x.yaml")
    check_vllm_arguments(config, document, tmp_path / "file" / "cache" / "verdicts.json")
    assert len(asked) == 1
    assert document.mistakes == ["x.yaml: Back.model: too large"]


def test_each_section_is_judged_once_for_all_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked: list[dict[str, Any]] = []

    def ask(question: str) -> list[Any]:
        asked.append(json.loads(question))
        return [
            {"section": name, "key": "seed", "message": "no number", "nearest": []}
            for name, section in asked[-1].items()
            if section["args"]["seed"] == "x"
        ]

    monkeypatch.setattr(vllm_arguments, "_ask_vllm", ask)
    monkeypatch.setattr(vllm_arguments, "vllm_version", lambda: "0.0")

    def mistakes(**seeds: Any) -> list[str]:
        """Of a graph with these services."""
        config: Any = SimpleNamespace(
            services=[
                SimpleNamespace(service=SimpleNamespace(name=name, flags="engine"), flags=flags)
                for name, flags in ((name, {"seed": seed}) for name, seed in seeds.items())
            ]
        )
        document = Document(source="x.yaml")
        check_vllm_arguments(config, document, tmp_path / "verdicts.json")
        return document.mistakes

    assert mistakes(Back=1, Front=2) == []
    assert mistakes(Front=2) == mistakes(Other=1, Back=2) == []
    assert [list(question) for question in asked] == [["Back", "Front"]]
    assert mistakes(Back=1, Front="x") == ["x.yaml: Front.seed: no number"]
    assert [list(question) for question in asked[1:]] == [["Front"]]
    assert mistakes(Other="x", Back=1) == ["x.yaml: Other.seed: no number"]
    assert len(asked) == 2


def test_many_graphs_of_one_folder_find_their_verdicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked: list[str] = []

    def ask(question: str) -> list[Any]:
        asked.append(question)
        return []

    monkeypatch.setattr(vllm_arguments, "_ask_vllm", ask)
    monkeypatch.setattr(vllm_arguments, "vllm_version", lambda: "0.0")
    for seed in [*range(100)] * 2:
        service = SimpleNamespace(
            service=SimpleNamespace(name="Back", flags="engine"), flags={"seed": seed}
        )
        config: Any = SimpleNamespace(services=[service])
        check_vllm_arguments(config, Document(source="x.yaml"), tmp_path / "verdicts.json")
    assert len(asked) == 100


def test_a_mapping_may_have_keys_that_are_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(vllm_arguments, "_ask_vllm", lambda question: [])
    monkeypatch.setattr(vllm_arguments, "vllm_version", lambda: "0.0")
    flags = {"hf-overrides": {"id2label": {0: "a", "other": "b", True: "c"}}}
    service = SimpleNamespace(service=SimpleNamespace(name="Back", flags="engine"), flags=flags)
    config: Any = SimpleNamespace(services=[service])
    document = Document(source="x.yaml")
    check_vllm_arguments(config, document, tmp_path / "verdicts.json")
    assert document.mistakes == []
