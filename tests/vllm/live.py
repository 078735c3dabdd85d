"""Output and effects of `dynamo-lite` commands on a running graph."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import yaml

from benchmarks.graph import options_in_use
from tests.process.command import run
from tests.vllm.graph import Graph, eventually

#: Stands for the value of the configuration file.
_FILE = "(file)"


def command(graph: Graph, *arguments: str) -> str:
    """What `dynamo-lite` prints about the graph."""
    result = run(*arguments, "--state-dir", str(graph.state_dir.resolve()))
    assert result.returncode == 0, result.stderr
    return result.stdout


def explained(graph: Graph, request_id: str) -> list[dict[str, Any]]:
    return json.loads(command(graph, "explain", request_id, "--json"))


@contextmanager
def live_options(graph: Graph, options: dict[str, Any]) -> Iterator[None]:
    """Sets them, by `Component.option`, and puts them back; all processes follow."""
    edits = [f"{key}={value}" for key, value in options.items()]
    command(graph, "config", "set", *edits)
    try:
        _all_use(graph, {key: yaml.safe_load(str(value)) for key, value in options.items()})
        yield
    finally:
        command(graph, "config", "unset", *options)
        _all_use(graph, dict.fromkeys(options, _FILE))


def _all_use(graph: Graph, options: dict[str, Any]) -> None:
    """Also the engines, which only their logs say."""

    def lag() -> list[str]:
        return [
            f"{component}-{process.instance} uses {used}"
            for component, _, option in (key.partition(".") for key in options)
            for process in graph.processes(component)
            if process.state == "ready"
            for used in options_in_use(process)
            if used.get(option, _FILE) != options[f"{component}.{option}"]
        ]

    eventually(lambda: not lag(), timeout_s=10, what="all processes follow")
