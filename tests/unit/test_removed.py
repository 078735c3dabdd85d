"""Options and commands of the release before: each is refused with what to use instead."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from dynamo_lite.cli.cli import app
from dynamo_lite.cli.live_options import split_key
from dynamo_lite.protocol.errors import ConfigError
from dynamo_lite.serve import removed
from dynamo_lite.serve.config import accepted_keys, resolve
from dynamo_lite.serve.document import read_document
from dynamo_lite.serve.services.services import (
    FRONTEND,
    PLANNER,
    PREFILL_WORKER,
    VLLM_WORKER,
)

GRAPH = FRONTEND.link(VLLM_WORKER).link(PREFILL_WORKER).link(PLANNER)


def refused(tmp_path: Path, key: str) -> list[str]:
    file = tmp_path / "graph.yaml"
    models = "".join(
        f"{name}: {{model: m}}\n" for name in ("Frontend", "VllmWorker", "PrefillWorker")
    )
    file.write_text(models)
    document = read_document(file, [f"--{key}=1"])
    resolve(GRAPH, document)
    return document.mistakes


@pytest.mark.parametrize(
    "key", ["VllmWorker.gone", "Planner.gone", "Graph.gone", "VllmWorker.queue.gone"]
)
def test_an_option_that_is_gone_says_what_to_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
):
    monkeypatch.setattr(removed, "REMOVED_OPTIONS", {key: "use the other one"})
    assert refused(tmp_path, key) == [f"--{key}: removed in 0.3.0: use the other one"]


def test_a_live_option_that_is_gone_says_what_to_use(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(removed, "REMOVED_OPTIONS", {"VllmWorker.gone": "use the other one"})
    with pytest.raises(ConfigError, match="use the other one"):
        split_key("VllmWorker.gone")


@pytest.mark.parametrize(
    ("gone", "given"),
    [
        ("gone", ["gone", "--option", "1"]),
        ("top --gone", ["top", "--once", "--gone=1"]),
        ("top --gone", ["top", "--gone", "1"]),
        ("config gone", ["config", "gone", "--option", "1"]),
    ],
)
def test_a_command_or_its_option_that_is_gone_says_what_to_use(
    monkeypatch: pytest.MonkeyPatch, gone: str, given: list[str]
):
    monkeypatch.setattr(removed, "REMOVED_COMMANDS", {gone: "use the other one"})
    result = CliRunner().invoke(app, given)
    assert isinstance(result.exception, ConfigError)
    assert result.exception.mistakes == [f"{gone}: removed in 0.3.0: use the other one"]
    assert CliRunner().invoke(app, ["planner", "gone"]).exit_code == 2


def test_nothing_that_is_there_is_listed_as_gone():
    there = {
        f"{service.name}.{key}" for service in GRAPH.services for key in accepted_keys(service)
    }
    assert there.isdisjoint(removed.REMOVED_OPTIONS)
