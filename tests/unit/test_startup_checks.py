"""The checks before any process starts."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo_lite.serve import startup_checks
from dynamo_lite.serve.document import Document
from dynamo_lite.serve.startup_checks import check_vllm_arguments


def test_a_cache_that_cannot_be_written_is_no_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked: list[str] = []

    def ask(question: str) -> list[Any]:
        asked.append(question)
        return [{"section": "Back", "key": "model", "message": "too large"}]

    monkeypatch.setattr(startup_checks, "_ask_vllm", ask)
    monkeypatch.setattr(startup_checks, "vllm_version", lambda: "0.0")
    service = SimpleNamespace(service=SimpleNamespace(name="Back", flags="engine"), flags={})
    config: Any = SimpleNamespace(services=[service])
    (tmp_path / "file").touch()
    document = Document(source="x.yaml")
    check_vllm_arguments(config, document, tmp_path / "file" / "cache" / "verdicts.json")
    assert len(asked) == 1
    assert document.mistakes == ["x.yaml: Back.model: too large"]
