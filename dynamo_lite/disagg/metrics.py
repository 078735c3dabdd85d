"""The counters of both halves as Prometheus metrics of the component that runs them."""

from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram

from dynamo_lite.disagg.counters import (
    BYTES,
    COMPUTED,
    DECISION,
    DESCRIPTORS,
    DROPPED,
    FENCED,
    FLIGHT_WAIT,
    FLIGHT_WAIT_SECONDS,
    LATE,
    MISMATCH,
    PREFIX_BYTES,
    PREFIX_READ,
    REMOTE,
    RESUME,
    SECONDS,
    STAGE,
)
from dynamo_lite.protocol.generate import PrefillCounts
from dynamo_lite.runtime.drops import OnDrop, uncounted


class RemotePrefillMetrics:
    """At most one per registry.

    on_drop: called for each message that the engine's processes have dropped.
    """

    def __init__(self, registry: CollectorRegistry, on_drop: OnDrop = uncounted):
        self._on_drop = on_drop
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
            "Stages of a remote prefill: decide, publish, pull (its wait in the queue), claim,"
            " fill, notice (the end of fill), resume, first_token in the decode engine; wait,"
            " compute, write (the last one, which commits) in the prefill engine",
            ["stage"],
            buckets=(0.0001, 0.0003, 0.001, 0.002, 0.005, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30),
            registry=registry,
        )
        self._late = Counter(
            "dynamo_lite_late_notices",
            "Commit notifications that came after their attempts had been given up",
            registry=registry,
        )
        self._fenced = Counter(
            "dynamo_lite_fenced_writes",
            "KV writes refused because the worker's lease was not certain",
            registry=registry,
        )
        self._mismatches = Counter(
            "dynamo_lite_commit_mismatches",
            "Commits whose blocks did not hold what their writer sent; they are computed locally",
            registry=registry,
        )
        self._flight_waits = Counter(
            "dynamo_lite_single_flight_waits",
            "Waits for another request's remote prefill of the same prefix, by how they ended:"
            " hit (the prefix is in the cache), miss, cancelled",
            ["outcome"],
            registry=registry,
        )
        self._flight_wait_seconds = Histogram(
            "dynamo_lite_single_flight_wait_seconds",
            "How long requests waited for another request's remote prefill",
            buckets=(0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30),
            registry=registry,
        )
        self._resumes = Counter(
            "dynamo_lite_remote_prefill_resumes",
            "Remote prefills that failed or were given up, by whether another prefill worker"
            " may compute the rest: writer_lost (yes), or the reason why not",
            ["reason"],
            registry=registry,
        )
        self._computed = Counter(
            "dynamo_lite_prefill_computed_tokens",
            "Prompt tokens that were computed for decode workers, neither cached nor read",
            registry=registry,
        )
        self._prefix_reads = Counter(
            "dynamo_lite_prefix_reads",
            "Prefixes read from decode workers instead of computed, by outcome: read, failed"
            " (and then computed)",
            ["outcome"],
            registry=registry,
        )
        self._prefix_bytes = Counter(
            "dynamo_lite_prefix_read_bytes",
            "KV bytes requested in reads of prefixes",
            registry=registry,
        )

        self._takers: dict[str, Callable[[str, Any], None]] = {
            DECISION: lambda labels, n: self._decisions.labels(*labels.split("/")).inc(n),
            REMOTE: lambda outcome, n: self._remote.labels(outcome).inc(n),
            STAGE: lambda stage, all_s: _observe(self._stages.labels(stage), all_s),
            SECONDS: lambda _, all_s: _observe(self._seconds, all_s),
            BYTES: lambda _, n: self._bytes.inc(n),
            DESCRIPTORS: lambda _, n: self._descriptors.inc(n),
            LATE: lambda _, n: self._late.inc(n),
            FENCED: lambda _, n: self._fenced.inc(n),
            MISMATCH: lambda _, n: self._mismatches.inc(n),
            FLIGHT_WAIT: lambda outcome, n: self._flight_waits.labels(outcome).inc(n),
            FLIGHT_WAIT_SECONDS: lambda _, all_s: _observe(self._flight_wait_seconds, all_s),
            RESUME: lambda reason, n: self._resumes.labels(reason).inc(n),
            COMPUTED: lambda _, n: self._computed.inc(n),
            PREFIX_READ: lambda outcome, n: self._prefix_reads.labels(outcome).inc(n),
            PREFIX_BYTES: lambda _, n: self._prefix_bytes.inc(n),
            DROPPED: self._drop,
        }

    def apply(self, data: Mapping[str, Any]) -> None:
        """Adds the counters of one step. Unknown names are ignored."""
        for name, value in data.items():
            kind, _, labels = name.partition("/")
            if (take := self._takers.get(kind)) is not None:
                take(labels, value)

    def first_token(self, counts: PrefillCounts) -> None:
        """Counts the time to a prompt's first token if its KV came from a prefill worker."""
        if counts.external_cached_tokens:
            self._stages.labels("first_token").observe(counts.prefill_s)

    def _drop(self, where: str, count: float) -> None:
        for _ in range(int(count)):
            self._on_drop(where)


def _observe(histogram: Histogram, all_s: list[float]) -> None:
    for seconds in all_s:
        histogram.observe(seconds)
