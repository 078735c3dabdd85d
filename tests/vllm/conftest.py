"""The graphs and the reference that the tests of this folder share.

Two cores carry one graph at a time. `disagg` is the shared one, started when
first asked for; a test that breaks things takes `stage` and starts its own,
before which the shared one is stopped.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.vllm.graph import DISAGG, MODEL, TOOL_FLAGS, Graph, PlainServer


class Stage:
    """Holds the one graph that runs."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._started = 0
        self._shared: Graph | None = None

    def shared(self) -> Graph:
        """configs/disagg.yaml as it is, with tools."""
        if self._shared is None:
            options = [f"--Frontend.{k}={json.dumps(v)}" for k, v in TOOL_FLAGS.items()]
            self._shared = self._new(DISAGG, options).__enter__()
        return self._shared

    @contextmanager
    def alone(
        self, graph: tuple[str, str] = DISAGG, options: Sequence[str] = ()
    ) -> Iterator[Graph]:
        """A graph for the caller only."""
        self.clear()
        with self._new(graph, options) as running:
            yield running

    def clear(self) -> None:
        shared, self._shared = self._shared, None
        if shared is not None:
            shared.stop()
            assert not shared.errors(), shared.errors()

    def _new(self, graph: tuple[str, str], options: Sequence[str]) -> Graph:
        self._started += 1
        return Graph(self._directory / f"graph-{self._started}", graph, options)


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    if not (MODEL / "recipe.json").exists():
        pytest.fail(f"{MODEL} is missing: run `make setup`")
    return MODEL


@pytest.fixture(scope="session")
def reference(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainServer]:
    """One plain vLLM engine behind vLLM's own server: what is right."""
    with PlainServer(tmp_path_factory.mktemp("plain")) as server:
        yield server


@pytest.fixture(scope="session")
def stage(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    stage = Stage(tmp_path_factory.mktemp("stage"))
    yield stage
    stage.clear()


@pytest.fixture
def disagg(stage: Stage) -> Iterator[Graph]:
    """The shared graph. Whoever uses it leaves it whole."""
    graph = stage.shared()
    pids = {p.service: p.pid for p in graph.processes()}
    yield graph
    assert {p.service: p.pid for p in graph.processes()} == pids, graph.tails()
    assert {p.state for p in graph.processes()} == {"ready"}, graph.tails()
