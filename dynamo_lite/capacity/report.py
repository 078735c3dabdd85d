"""The results of a run, as values for JSON and as lines of text."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from dynamo_lite.capacity.options import Slo
from dynamo_lite.capacity.routing import KvRouter
from dynamo_lite.capacity.run import Result

_SHARES = (("p50", 0.5), ("p90", 0.9), ("p95", 0.95), ("p99", 0.99))
#: Points of the curves of load and attainment.
_POINTS = 120


def summary(result: Result, slo: Slo) -> dict[str, Any]:
    """All figures of one run. The same run gives the same values."""
    records, graph, tally = result.records, result.graph, result.graph.tally
    met = [records.meets(number, slo) for number in range(records.arrived)]
    counted = max(len(met), 1)
    prefill_s, decode_s = graph.prefill.device_seconds(), graph.decode.device_seconds()
    good = sum(first and later for first, later in met)
    figures: dict[str, Any] = {
        "name": result.name,
        "interrupted": result.interrupted,
        "simulated_s": _round(result.ended_s),
        "events": result.events,
        "requests": {
            "arrived": records.arrived,
            "completed": records.completed,
            "refused": records.refused,
            "unfinished": records.unfinished,
        },
        "ttft_s": percentiles(records.ttft_s),
        "itl_s": {name: _round(tally.gaps.percentile(share)) for name, share in _SHARES}
        | {"mean": _round(tally.gaps.mean_s)},
        "request_itl_s": percentiles(records.itl_s),
        "total_s": percentiles(records.total_s),
        "attainment": {
            "ttft": _round(sum(first for first, _ in met) / counted),
            "itl": _round(sum(later for _, later in met) / counted),
            "both": _round(good / counted),
        },
        "good_requests_per_s": _round(good / max(result.ended_s, 1e-9)),
        "output_tokens_per_s": _round(records.output_tokens / max(result.ended_s, 1e-9)),
        "gpu_s": {
            "prefill": _round(prefill_s),
            "decode": _round(decode_s),
            "total": _round(prefill_s + decode_s),
        },
        "decisions": {
            f"{side} {reason}": count for (side, reason), count in sorted(tally.decisions.items())
        },
        "remote_prefills": dict(sorted(tally.outcomes.items())),
        "cached_share": _round(tally.cached_tokens / max(tally.prompt_tokens, 1)),
        "preemptions": sum(worker.engine.preemptions for worker in graph.decode.ready),
        "starts": graph.prefill.starts + graph.decode.starts,
        "stops": graph.prefill.stops + graph.decode.stops,
        "changes": [
            {"at_s": _round(one.at_s), "workers": str(one.wanted), "reason": one.reason}
            for one in result.changes
        ],
        "series": series(result, met),
    }
    if isinstance(graph.router, KvRouter):
        figures["placements"] = dict(sorted(graph.router.choices.items()))
    return figures


def percentiles(values: Iterable[float]) -> dict[str, float | None]:
    """Nearest ranks, and the mean, of what is a number."""
    known = sorted(value for value in values if not math.isnan(value))
    if not known:
        return dict.fromkeys((*(name for name, _ in _SHARES), "mean"))
    ranks = {name: known[math.ceil(share * len(known)) - 1] for name, share in _SHARES}
    return {name: _round(value) for name, value in ranks.items()} | {
        "mean": _round(math.fsum(known) / len(known))
    }


def series(result: Result, met: Sequence[tuple[bool, bool]]) -> dict[str, list[Any]]:
    """Curves over time. Load and attainment are of the requests that arrived in each interval."""
    requests = result.requests[: len(met)]
    width = max((requests[-1].arrival_s if requests else 0.0) / _POINTS, 1e-9)
    arrived, good = [0] * _POINTS, [0] * _POINTS
    for request, (first, later) in zip(requests, met, strict=True):
        at = min(int(request.arrival_s / width), _POINTS - 1)
        arrived[at] += 1
        good[at] += first and later
    samples = result.samples
    return {
        "arrivals_s": [_round(width * (i + 0.5)) for i in range(_POINTS)],
        "requests_per_s": [_round(count / width) for count in arrived],
        "attainment": [
            _round(ok / count) if count else None for ok, count in zip(good, arrived, strict=True)
        ],
        "at_s": [_round(one.at_s) for one in samples],
        "prefill": [one.prefill for one in samples],
        "decode": [one.decode for one in samples],
        "starting": [one.starting for one in samples],
        "draining": [one.draining for one in samples],
        "jobs": [one.jobs for one in samples],
        "in_flight": [one.in_flight for one in samples],
        "kv_usage": [_round(one.kv_usage) for one in samples],
    }


def table(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Lines of a table with a row per run."""
    head = ("", "done", "refused", "TTFT p50", "p95", "ITL p50", "p99", "attained", "GPU-s", "+/-")
    rows: list[tuple[str, ...]] = [head]
    for run in runs:
        asked = run["requests"]
        rows.append(
            (
                run["name"] + (" (interrupted)" if run["interrupted"] else ""),
                f"{asked['completed']:,}",
                f"{asked['refused'] + asked['unfinished']:,}",
                _duration(run["ttft_s"]["p50"]),
                _duration(run["ttft_s"]["p95"]),
                _duration(run["itl_s"]["p50"]),
                _duration(run["itl_s"]["p99"]),
                f"{100 * run['attainment']['both']:.1f} %",
                f"{run['gpu_s']['total']:,.0f}",
                f"{run['starts']}/{run['stops']}",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _round(value: float | None) -> float | None:
    """Six significant digits: sums in another order do not differ."""
    return None if value is None else float(f"{value:.6g}")
