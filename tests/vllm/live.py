"""Output and effects of `dynamo-lite` commands on a running graph."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.process.command import run
from tests.vllm.graph import Graph, eventually


def command(graph: Graph, *arguments: str) -> str:
    """What `dynamo-lite` prints about the graph."""
    result = run(*arguments, "--state-dir", str(graph.state_dir.resolve()))
    assert result.returncode == 0, result.stderr
    return result.stdout


def explained(graph: Graph, request_id: str) -> list[dict[str, Any]]:
    return json.loads(command(graph, "explain", request_id, "--json"))


def version_of(graph: Graph, component: str = "VllmWorker") -> int:
    """Of the component's live options."""
    listed = json.loads(command(graph, "config", "get", "--json"))
    return next(each["version"] for each in listed if each["component"] == component)


@contextmanager
def live_options(graph: Graph, options: dict[str, Any]) -> Iterator[None]:
    """Sets them, by `Component.option`, and puts them back; all processes follow."""
    command(graph, "config", "set", *(f"{key}={value}" for key, value in options.items()))
    try:
        _all_follow(graph)
        yield
    finally:
        command(graph, "config", "unset", *options)
        _all_follow(graph)


def _all_follow(graph: Graph) -> None:
    def lag() -> list[str]:
        listed = json.loads(command(graph, "config", "get", "--json"))
        return [
            f"{each['component']}: {process}"
            for each in listed
            for process in each["processes"]
            if not process["follows"]
        ]

    eventually(lambda: not lag(), timeout_s=10, what="all processes follow")
