"""The counts of both halves as Prometheus metrics of the component that runs them."""

from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram

from dynamo_lite.engine.remote_prefill.counts import (
    BYTES,
    DECISION,
    DESCRIPTORS,
    FENCED,
    LATE,
    REMOTE,
    SECONDS,
    STAGE,
)


class RemotePrefillMetrics:
    """Takes counts as they come; each registry can have one of these."""

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
