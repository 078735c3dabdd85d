"""The checks before any process starts."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo_lite.serve import startup_checks
from dynamo_lite.serve.document import Document
from dynamo_lite.serve.startup_checks import check_vllm_arguments, readable_by_others


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


@pytest.mark.parametrize(
    ("nats", "etcd", "named"),
    [
        (None, None, []),
        ("nats://127.0.0.1:4222,[::1]:4222", "http://localhost:2379", []),
        ("tls://10.0.0.1:4222", "https://etcd:2379", []),
        ("nats://10.0.0.1:4222", "http://etcd:2379", ["NATS", "etcd"]),
        ("nats://127.0.0.1:4222,10.0.0.1:4222", None, ["NATS"]),
    ],
)
def test_servers_of_other_hosts_without_tls_are_warned_of(
    nats: str | None, etcd: str | None, named: list[str]
):
    warnings = readable_by_others(nats, etcd)
    assert [warning.split()[1] for warning in warnings] == named
    assert all("without TLS" in warning for warning in warnings)


def test_a_warning_does_not_show_a_password():
    [warning] = readable_by_others("nats://me:hidden@nats:4222", None)
    assert "hidden" not in warning
