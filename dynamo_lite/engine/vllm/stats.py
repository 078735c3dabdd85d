"""What the connector halves tell the component, on vLLM's own way up.

Each half adds to a small dictionary; vLLM carries it, in order and without
loss, with the engine's scheduler statistics of the same step; the component
turns counters into Prometheus metrics and ended attempts into answers.
"""

from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

DECISION = "decision"  # + "/verdict/reason"
REMOTE = "remote"  # + "/outcome"
BYTES = "bytes"
DESCRIPTORS = "descriptors"
SECONDS = "seconds"  # a list of durations
STAGE = "stage"  # + "/stage": a list of durations
LATE = "late_notices"
FENCED = "fenced_writes"
ENDED = "ended"  # a list of [attempt, outcome, detail]: see `AttemptOutcome`


class ConnectorStats(KVConnectorStats):
    """data: name -> number, or list of numbers."""

    def add(self, name: str, amount: float = 1) -> None:
        self.data[name] = self.data.get(name, 0) + amount

    def append(self, name: str, value: Any) -> None:
        self.data.setdefault(name, []).append(value)

    def add_stage(self, stage: str, seconds: float) -> None:
        self.append(f"{STAGE}/{stage}", seconds)

    def take(self) -> "ConnectorStats | None":
        """What was collected since the last call; None when nothing was."""
        if not self.data:
            return None
        taken = ConnectorStats(data=self.data)
        self.data = {}
        return taken

    def reset(self) -> None:
        self.data = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> "ConnectorStats":
        merged: dict[str, Any] = dict(self.data)
        for name, value in other.data.items():
            merged[name] = merged[name] + value if name in merged else value
        return ConnectorStats(data=merged)

    def reduce(self) -> dict[str, int | float]:
        return {k: len(v) if isinstance(v, list) else v for k, v in self.data.items()}


class ConnectorMetrics:
    """The Prometheus side."""

    def __init__(self, registry: CollectorRegistry):
        self._decisions = Counter(
            "dynamo_lite_prefill_decisions",
            "Prefill decisions of the disaggregated router",
            ["verdict", "reason"],
            registry=registry,
        )
        self._remote = Counter(
            "dynamo_lite_remote_prefills",
            "Remote prefills by how they ended for the request",
            ["outcome"],
            registry=registry,
        )
        self._bytes = Counter(
            "dynamo_lite_kv_transfer_bytes", "KV bytes written to peers", registry=registry
        )
        self._descriptors = Counter(
            "dynamo_lite_kv_transfer_descriptors",
            "Memory descriptors used for KV writes",
            registry=registry,
        )
        self._seconds = Histogram(
            "dynamo_lite_kv_transfer_seconds",
            "From the start of a KV write to its completion",
            buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5),
            registry=registry,
        )
        self._stages = Histogram(
            "dynamo_lite_remote_prefill_stage_seconds",
            "Stages of a remote prefill: decide, publish, pull, fill, resume in the decode"
            " engine; wait, compute, write (the last one, which commits) in the prefill engine",
            ["stage"],
            buckets=(0.0001, 0.0003, 0.001, 0.002, 0.005, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30),
            registry=registry,
        )
        self._late = Counter(
            "dynamo_lite_late_notices",
            "Commit notices for attempts that nobody waited for",
            registry=registry,
        )
        self._fenced = Counter(
            "dynamo_lite_fenced_writes",
            "KV writes refused because the worker's lease was not certain",
            registry=registry,
        )

    def apply(self, data: Mapping[str, Any]) -> None:
        """Unknown names are ignored."""
        for name, value in data.items():
            kind, *labels = name.split("/")
            if kind == DECISION:
                self._decisions.labels(*labels).inc(value)
            elif kind == REMOTE:
                self._remote.labels(*labels).inc(value)
            elif kind == STAGE:
                for seconds in value:
                    self._stages.labels(*labels).observe(seconds)
            elif kind == SECONDS:
                for seconds in value:
                    self._seconds.observe(seconds)
            elif counter := {
                BYTES: self._bytes,
                DESCRIPTORS: self._descriptors,
                LATE: self._late,
                FENCED: self._fenced,
            }.get(kind):
                counter.inc(value)
