"""The graphs and the reference that the tests of this folder share.

Two cores carry one graph at a time. `disagg`, `slow` and `pair` are shared, started when
first asked for; a test that needs another takes `stage` and starts its own, before
which the shared one is stopped. Tests of one graph follow each other, so that each
is started once.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.collector import Collector, collecting
from tests.vllm.graph import (
    DISAGG,
    MODEL,
    PAIR_OPTIONS,
    TOOL_FLAGS,
    UNCOMPILED,
    Graph,
    PlainServer,
)
from tests.vllm.slow import SLOW_OPTIONS

#: configs/disagg.yaml as it is, with tools; traced is what a client traces.
_DISAGG_OPTIONS = (
    *(f"--Frontend.{key}={json.dumps(on)}" for key, on in TOOL_FLAGS.items()),
    *(
        f"--{service}.ServiceArgs.env.OTEL_BSP_SCHEDULE_DELAY=100"
        for service in ("Frontend", "VllmWorker", "PrefillWorker")
    ),
    *(
        f"--{service}.ServiceArgs.env.{key}={value}"
        for service in ("VllmWorker", "PrefillWorker")
        for key, value in UNCOMPILED.items()
    ),
    "--Graph.trace-ratio=0",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    """Stable: tests of other folders, and those without a graph, stay in front."""
    names = getattr(item, "fixturenames", ())
    if "disagg" in names:
        return 1
    if "slow" in names:
        return 3
    if "pair" in names:
        return 5 if item.get_closest_marker("takes_workers") else 4
    return 2 if "stage" in names else 0


class Stage:
    """Holds the one graph that runs. collector_url: where the shared graph's spans go."""

    def __init__(self, directory: Path, collector_url: str):
        self._directory, self._collector_url = directory, collector_url
        self._started = 0
        self._options: tuple[str, ...] = ()
        self._shared: Graph | None = None

    def disagg(self) -> Graph:
        """The shared graph that is configs/disagg.yaml."""
        return self.shared((*_DISAGG_OPTIONS, f"--Graph.otlp-endpoint={self._collector_url}"))

    def shared(self, options: tuple[str, ...]) -> Graph:
        """The graph of the caller before, if it had these options."""
        if self._shared is None or self._options != options:
            self.clear()
            self._shared, self._options = self._new(DISAGG, options).__enter__(), options
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
            # The log of a graph with killed processes contains errors.
            whole = self._options[: len(_DISAGG_OPTIONS)] == _DISAGG_OPTIONS
            assert not (whole and shared.errors()), shared.errors()

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
def collector() -> Iterator[Collector]:
    """Takes the spans of the shared graph, and outlives it."""
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="session")
def stage(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, collector: Collector
) -> Iterator[Stage]:
    stage = Stage(tmp_path_factory.mktemp("stage"), collector.url)
    yield stage
    stage.clear()


@pytest.fixture
def disagg(stage: Stage) -> Iterator[Graph]:
    """The shared graph. Each test that uses it must leave it complete."""
    graph = stage.disagg()
    pids = {p.service: p.pid for p in graph.processes()}
    yield graph
    assert {p.service: p.pid for p in graph.processes()} == pids, graph.tails()
    assert {p.state for p in graph.processes()} == {"ready"}, graph.tails()


@pytest.fixture
def slow(stage: Stage) -> Graph:
    """One decode worker, and one prefill worker that computes block by block."""
    return stage.shared(SLOW_OPTIONS)


@pytest.fixture
def pair(stage: Stage) -> Graph:
    """Two decode workers and one prefill worker. A test that removes a worker for good is
    marked `takes_workers`; all others leave as many as there were."""
    return stage.shared(PAIR_OPTIONS)
