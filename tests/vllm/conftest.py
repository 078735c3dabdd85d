"""The graphs and the reference that the tests of this folder share.

Two cores carry one graph at a time. `disagg`, `slow` and `pair` are shared, started when first
asked for; a test that needs another takes `stage` and starts its own,
before which the shared one is stopped. Tests of one graph follow each other, so that each is
started once.
"""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.collector import Collector, collecting
from tests.vllm.graph import (
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
    "--Frontend.enable-prompt-tokens-details=true",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    """Stable: tests of other folders, and those without a graph, stay in front."""
    names = getattr(item, "fixturenames", ())
    takes = item.get_closest_marker("takes_workers") is not None
    if "disagg" in names:
        return 3
    if "slow" in names:
        return 6
    if "pair" in names:
        return 7 + takes
    return 4 if "stage" in names else 0


class Stage:
    """Holds the one graph that runs. collector_url: where the shared graph's spans go."""

    def __init__(self, directory: Path, collector_url: str):
        self._directory, self._collector_url = directory, collector_url
        self._started = 0
        self._wanted: tuple[str, ...] = ()
        self._shared: Graph | None = None

    def disagg(self) -> Graph:
        """The shared graph that is configs/disagg.yaml."""
        return self.shared((*_DISAGG_OPTIONS, f"--Graph.otlp-endpoint={self._collector_url}"))

    def shared(self, options: tuple[str, ...]) -> Graph:
        """The graph of the caller before, if it was one with these options."""
        if self._shared is None or self._wanted != options:
            with self._leaving():
                self._started += 1
                directory = self._directory / f"graph-{self._started}"
                self._shared = Graph(directory, options=options).__enter__()
                self._wanted = options
        return self._shared

    def clear(self) -> None:
        with self._leaving():
            pass

    @contextmanager
    def _leaving(self) -> Iterator[None]:
        """The shared graph drains while the body starts the next one."""
        shared, self._shared = self._shared, None
        if shared is None:
            yield
            return
        # The log of a graph with killed processes contains errors.
        whole = self._wanted[: len(_DISAGG_OPTIONS)] == _DISAGG_OPTIONS
        shared.signal(signal.SIGINT)
        try:
            yield
        finally:
            assert shared.end() == 0, shared.tails()
        assert not (whole and shared.errors()), shared.errors()


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    if not (MODEL / "recipe.json").exists():
        pytest.fail(f"{MODEL} is missing: run `make setup`")
    return MODEL


@pytest.fixture(scope="session")
def reference(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainServer]:
    """One plain vLLM engine behind vLLM's own server: what is right."""
    # A graph compiles all grammars with this backend. A plain engine would choose one for each, and
    # word its errors by it.
    grammars = {"backend": "xgrammar"}
    told = {"enable-prompt-tokens-details": True, "structured-outputs-config": grammars}
    with PlainServer(tmp_path_factory.mktemp("plain"), flags=told) as server:
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
    """One decode worker, and one prefill worker that computes block by block. No test asks for a
    grammar through its own Frontend."""
    return stage.shared(SLOW_OPTIONS)


@pytest.fixture
def pair(stage: Stage) -> Graph:
    """Two decode workers and one prefill worker. A test that removes a worker for good is
    marked `takes_workers`; all others leave as many as there were."""
    return stage.shared(PAIR_OPTIONS)
