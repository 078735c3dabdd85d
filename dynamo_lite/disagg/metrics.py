"""The metrics of remote prefills: the name of each one's counter, and its text."""

from functools import partial

from prometheus_client import Counter, Histogram

#: Makes the metric of a counter, by the counter's name. The values of the metric's labels stand
#: behind that name, as in "decision/remote/long".
METRICS: dict[str, partial[Counter | Histogram]] = {}


def _number(name: str, metric: str, text: str, *labels: str) -> str:
    METRICS[name] = partial(Counter, metric, text, labels)
    return name


def _durations(name: str, metric: str, text: str, *labels: str, buckets: tuple[float, ...]) -> str:
    METRICS[name] = partial(Histogram, metric, text, labels, buckets=buckets)
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
