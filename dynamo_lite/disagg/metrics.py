"""The counters of both halves as Prometheus metrics of the component that runs them."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram

from dynamo_lite.disagg import counters
from dynamo_lite.protocol.generate import PrefillCounts
from dynamo_lite.runtime.drops import OnDrop, uncounted

_KV_WRITE_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5)
_STAGE_S = (0.0001, 0.0003, 0.001, 0.002, 0.005, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)

#: Counter to its metric. The values of the metric's labels stand behind the counter's name.
_METRICS = {
    counters.DECISION: partial(
        Counter,
        "dynamo_lite_prefill_decisions",
        "Prefill decisions, by verdict and reason",
        ["verdict", "reason"],
    ),
    counters.ASKED: partial(
        Counter,
        "dynamo_lite_prefill_asked_tokens",
        "Prompt tokens that decode workers asked prefill workers to compute",
    ),
    counters.OVERFLOW: partial(
        Counter,
        "dynamo_lite_prefill_overflow_tokens",
        "Uncached tokens of prompts that decode workers computed themselves because the"
        " prefill queue had no room for them, or was unknown",
    ),
    counters.REMOTE: partial(
        Counter,
        "dynamo_lite_remote_prefills",
        "Remote prefills, by how they ended for the request",
        ["outcome"],
    ),
    counters.BYTES: partial(Counter, "dynamo_lite_kv_transfer_bytes", "KV bytes written to peers"),
    counters.DESCRIPTORS: partial(
        Counter,
        "dynamo_lite_kv_transfer_descriptors",
        "Memory descriptors used for KV writes",
    ),
    counters.SECONDS: partial(
        Histogram,
        "dynamo_lite_kv_transfer_seconds",
        "From the start of a KV write to its completion",
        buckets=_KV_WRITE_S,
    ),
    counters.STAGE: partial(
        Histogram,
        "dynamo_lite_remote_prefill_stage_seconds",
        "Stages of a remote prefill: decide, publish, pull (its wait in the queue), claim,"
        " fill, resume, first_token in the decode engine; wait, compute, write (the last one,"
        " which commits) in the prefill engine",
        ["stage"],
        buckets=_STAGE_S,
    ),
    counters.LATE: partial(
        Counter,
        "dynamo_lite_late_notices",
        "Notifications of writes for attempts that had ended",
    ),
    counters.STOPPED: partial(
        Counter,
        "dynamo_lite_stopped_writes",
        "Attempts whose rest was not written, because their claim had ended",
    ),
    counters.MISMATCH: partial(
        Counter,
        "dynamo_lite_commit_mismatches",
        "Attempts whose commits did not fit their blocks; they are computed locally",
    ),
    counters.FLIGHT_WAIT: partial(
        Counter,
        "dynamo_lite_single_flight_waits",
        "Waits for another request's remote prefill of the same prefix, by how they ended:"
        " hit (the prefix is in the cache), miss, cancelled",
        ["outcome"],
    ),
    counters.RESUME: partial(
        Counter,
        "dynamo_lite_remote_prefill_resumes",
        "Remote prefills that failed or were given up, by whether another prefill worker"
        " may compute the rest: writer_lost (yes), or the reason why not",
        ["reason"],
    ),
    counters.COMPUTED: partial(
        Counter,
        "dynamo_lite_prefill_computed_tokens",
        "Prompt tokens that were computed for decode workers, neither cached nor read",
    ),
    counters.PREFIX_READ: partial(
        Counter,
        "dynamo_lite_prefix_reads",
        "Prefixes read from decode workers instead of computed, by outcome: read, failed"
        " (and then computed)",
        ["outcome"],
    ),
    counters.PREFIX_BYTES: partial(
        Counter,
        "dynamo_lite_prefix_read_bytes",
        "KV bytes requested in reads of prefixes",
    ),
}


class RemotePrefillMetrics:
    """At most one per registry.

    on_drop: called for each message that the engine's processes have dropped.
    """

    def __init__(self, registry: CollectorRegistry, on_drop: OnDrop = uncounted):
        self._on_drop = on_drop
        self._metrics = {name: make(registry=registry) for name, make in _METRICS.items()}

    def apply(self, data: Mapping[str, Any]) -> None:
        """Adds the counters of one step. Unknown names are ignored."""
        for name, value in data.items():
            counter, _, labels = name.partition("/")
            if counter == counters.DROPPED:
                for _ in range(int(value)):
                    self._on_drop(labels)
            elif (metric := self._metrics.get(counter)) is not None:
                child = metric.labels(*labels.split("/")) if labels else metric
                if isinstance(child, Histogram):
                    for seconds in value:
                        child.observe(seconds)
                else:
                    child.inc(value)

    def first_token(self, counts: PrefillCounts) -> None:
        """Counts the time to a prompt's first token if its KV came from a prefill worker."""
        if counts.external_cached_tokens:
            self.apply({f"{counters.STAGE}/first_token": [counts.prefill_s]})
