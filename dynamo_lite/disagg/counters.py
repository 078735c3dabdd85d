"""Counters of a scheduler or worker half, collected for the next step, and their metrics.

A half adds to a small dictionary. The engine carries it to its component with the
statistics of the same step, in order and without loss. Spans go the same way, as short lists: the
engine's processes have no tracing library.
"""

import threading
from collections.abc import Mapping
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram

from dynamo_lite.protocol.generate import PrefillCounts
from dynamo_lite.protocol.trace import TraceContext
from dynamo_lite.runtime.drops import OnDrop, uncounted
from dynamo_lite.runtime.tracing import Attributes

#: Makes the metric of a counter, by the counter's name. The values of the metric's labels stand
#: behind that name, as in "decision/remote/long".
_METRICS: dict[str, partial[Counter | Histogram]] = {}


def _number(name: str, metric: str, text: str, *labels: str) -> str:
    _METRICS[name] = partial(Counter, metric, text, labels)
    return name


def _durations(name: str, metric: str, text: str, *labels: str, buckets: tuple[float, ...]) -> str:
    _METRICS[name] = partial(Histogram, metric, text, labels, buckets=buckets)
    return name


DECISION = _number(
    "decision",
    "dynamo_lite_prefill_decisions",
    "Prefill decisions, by verdict and reason",
    "verdict",
    "reason",
)
ASKED = _number(
    "asked_tokens",
    "dynamo_lite_prefill_asked_tokens",
    "Prompt tokens that decode workers asked prefill workers to compute",
)
OVERFLOW = _number(
    "overflow_tokens",
    "dynamo_lite_prefill_overflow_tokens",
    "Uncached tokens of prompts that decode workers computed themselves because the"
    " prefill queue had no room for them, or was unknown",
)
REMOTE = _number(
    "remote",
    "dynamo_lite_remote_prefills",
    "Remote prefills, by how they ended for the request",
    "outcome",
)
BYTES = _number("bytes", "dynamo_lite_kv_transfer_bytes", "KV bytes written to peers")
DESCRIPTORS = _number(
    "descriptors",
    "dynamo_lite_kv_transfer_descriptors",
    "Memory descriptors used for KV writes",
)
SECONDS = _durations(
    "seconds",
    "dynamo_lite_kv_transfer_seconds",
    "From the start of a KV write to its completion",
    buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5),
)
STAGE = _durations(
    "stage",
    "dynamo_lite_remote_prefill_stage_seconds",
    "Stages of a remote prefill: decide, queue (until a prefill worker has claimed it), fill,"
    " resume, first_token in the decode engine; wait, compute, write (the last one, which"
    " commits) in the prefill engine",
    "stage",
    buckets=(0.0001, 0.0003, 0.001, 0.002, 0.005, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30),
)
LATE = _number(
    "late_notices",
    "dynamo_lite_late_notices",
    "Notifications of writes for attempts that are not awaited: they had ended, or the rank did not"
    " know them yet",
)
STOPPED = _number(
    "stopped_writes",
    "dynamo_lite_stopped_writes",
    "Attempts whose rest was not written, because their claim had ended",
)
MISMATCH = _number(
    "commit_mismatches",
    "dynamo_lite_commit_mismatches",
    "Attempts whose commits did not fit their blocks; they are computed locally",
)
FLIGHT_WAIT = _number(
    "single_flight",
    "dynamo_lite_single_flight_waits",
    "Waits for another request's remote prefill of the same prefix, by how they ended:"
    " hit (the prefix is in the cache), miss, cancelled",
    "outcome",
)
RESUME = _number(
    "resume",
    "dynamo_lite_remote_prefill_resumes",
    "Remote prefills that failed or were given up, by whether another prefill worker"
    " may compute the rest: writer_lost (yes), or the reason why not",
    "reason",
)
COMPUTED = _number(
    "computed_tokens",
    "dynamo_lite_prefill_computed_tokens",
    "Prompt tokens that were computed for decode workers, neither cached nor read",
)
PREFIX_READ = _number(
    "prefix_read",
    "dynamo_lite_prefix_reads",
    "Prefixes read from decode workers instead of computed, by outcome: read, failed"
    " (and then computed)",
    "outcome",
)
PREFIX_BYTES = _number(
    "prefix_bytes",
    "dynamo_lite_prefix_read_bytes",
    "KV bytes requested in reads of prefixes",
)
# Not metrics of their own.
DROPPED = "dropped"  # + "/where": see `runtime/drops.py`
BROKEN_LINK = "broken_link"  # a list of [decode engine, why a transfer with it failed]
SPAN = "span"  # a list of spans: see `note_span`
ENDED = "ended"  # a list of [attempt, outcome, detail]: see `AttemptOutcome`


class Counters:
    """Any thread may add to it."""

    def __init__(self) -> None:
        #: By name: a number, or a list of values.
        self.data: dict[str, Any] = {}
        self._lock = threading.Lock()

    def add(self, name: str, amount: float = 1) -> None:
        with self._lock:
            self.data[name] = self.data.get(name, 0) + amount

    def append(self, name: str, value: Any) -> None:
        with self._lock:
            self.data.setdefault(name, []).append(value)

    def drop(self, where: str, messages: int = 1) -> None:
        """Counts dropped messages; an `OnDrop`."""
        self.add(f"{DROPPED}/{where}", messages)

    def add_stage(self, stage: str, seconds: float) -> None:
        self.append(f"{STAGE}/{stage}", seconds)

    def take(self) -> dict[str, Any]:
        """Returns what was collected since the last call."""
        with self._lock:
            taken, self.data = self.data, {}
        return taken


def note_span(
    stats: Counters,
    name: str,
    context: TraceContext,
    parent: str,
    start: float,
    end: float,
    *,
    attributes: Attributes | None = None,
) -> None:
    """As `Tracer.record` of an internal span, by this host's monotonic clock. Any thread."""
    ids = (context.trace_id, context.span_id, parent)
    stats.append(SPAN, [name, *ids, start, max(start, end), "internal", dict(attributes or {})])


def note_child(
    stats: Counters,
    name: str,
    parent: TraceContext,
    start: float,
    end: float,
    attributes: Attributes | None = None,
) -> None:
    """As `Tracer.record_child`."""
    note_span(stats, name, parent.child(), parent.span_id, start, end, attributes=attributes)


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
            if counter == DROPPED:
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
            self.apply({f"{STAGE}/first_token": [counts.prefill_s]})
