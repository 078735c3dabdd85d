"""The checks before any process starts."""

import json
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo_lite.protocol.errors import ConfigError, StartupError
from dynamo_lite.serve import startup_checks
from dynamo_lite.serve.command import hold
from dynamo_lite.serve.config import resolve
from dynamo_lite.serve.document import Document, read_document
from dynamo_lite.serve.graphs import load_graph
from dynamo_lite.serve.startup_checks import (
    check_bind_host,
    check_planner,
    check_urls,
    check_vllm_arguments,
)

FILE = Path(__file__).resolve().parents[2] / "configs" / "disagg_planner.yaml"
LINE = next(n for n, line in enumerate(FILE.read_text().split("\n"), 1) if "Planner:" in line)


@pytest.mark.parametrize(
    ("nats", "etcd", "named"),
    [
        (None, None, ""),
        ("nats://127.0.0.1:4222,[::1]:4222", "http://localhost:2379", ""),
        ("tls://me:hidden@10.0.0.1:4222", "https://etcd:2379", ""),
        ("nats://me:hidden@10.0.0.1:4222", "http://etcd:2379", "--nats-url"),
        ("nats://me:hidden@127.0.0.1:4222,10.0.0.1:4222", None, "--nats-url"),
        (None, "http://me:hidden@127.0.0.1,etcd", "--etcd-url"),
    ],
)
def test_servers_of_other_hosts_are_reached_over_tls_only(
    nats: str | None, etcd: str | None, named: str
):
    if not named:
        check_urls(nats, etcd)
        return
    with pytest.raises(ConfigError) as refused:
        check_urls(nats, etcd)
    [mistake] = refused.value.mistakes
    scheme = "tls" if named == "--nats-url" else "https"
    assert mistake.startswith(f"{named}: ") and "hidden" not in mistake
    assert f"write {scheme}://, and name its authority: Graph.certificates" in mistake


@pytest.mark.parametrize("bind_host", ["0.0.0.0", "node-1", "::", "10.0.0.9"])
def test_what_others_reach_needs_certificates(bind_host: str):
    check_bind_host("127.0.0.1", "n", "--bind-host", "--certificates")
    with pytest.raises(ConfigError) as refused:
        check_bind_host(bind_host, "n", "--bind-host", "--certificates")
    [mistake] = refused.value.mistakes
    assert mistake.startswith(f"--bind-host: {bind_host} is reachable from other hosts")
    assert "(dynamo-lite access certs DIR --namespace n)" in mistake


def test_a_budget_below_the_minima_is_refused():
    document = read_document(FILE, ["--Planner.decode-min=4", "--Planner.decode-max=4"])
    config = resolve(load_graph("graphs.disagg_planner:Frontend"), document)
    check_planner(config, document)
    assert document.mistakes == [
        f"{FILE}:{LINE}: Planner: prefill-min and decode-min are 5 together, more than"
        " budget-devices, 4"
    ]


@pytest.mark.parametrize(
    ("file", "found"), [("params.json", True), ("config.json", True), ("x", False)]
)
def test_a_model_s_folder_may_be_in_the_home_folder_and_in_mistral_s_format(
    file: str, found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / file).touch()
    document = read_document(FILE, ["--Common.model=~/model", "--Frontend.port=0"])
    config = resolve(load_graph("graphs.disagg_planner:Frontend"), document)
    assert {c.flags["model"] for c in config.here if c.flags} == {f"{tmp_path}/model"}
    refused = pytest.raises(StartupError, match=rf"no model \(.*\) at {tmp_path}/model")
    with ExitStack() as stack, nullcontext() if found else refused:
        hold(config, tmp_path, stack)


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

    monkeypatch.setattr(startup_checks, "_ask_vllm", ask)
    monkeypatch.setattr(startup_checks, "vllm_version", lambda: "vllm 0.32.0")
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
    monkeypatch.setattr(startup_checks, "vllm_version", lambda: "vllm 0.29.0")
    with pytest.raises(StartupError, match=r"vllm 0\.29\.0 was not tried .*--allow-untested-vllm"):
        mistakes(Back={})
    assert asked == []
