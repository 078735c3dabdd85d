"""Runs of one trace with several scalers, by their names on the command line."""

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from dynamo_lite.capacity.options import GraphModelOptions, WorkerCounts
from dynamo_lite.capacity.planner import PlannerScaler
from dynamo_lite.capacity.request import TraceRequest
from dynamo_lite.capacity.run import Result, Run
from dynamo_lite.capacity.scaling import ORACLE_SHARES, Bounds, Oracle, Scaler, Scripted, Static
from dynamo_lite.capacity.timing import Timing
from dynamo_lite.policy.scaling.limits import contradictions
from dynamo_lite.protocol.errors import ConfigError
from dynamo_lite.protocol.options import PlannerOptions

#: Most workers of one role.
MOST_WORKERS = 100_000
_COUNTS = re.compile(r"(\d+)P(\d+)D", re.IGNORECASE)
ACCEPTED = (
    "static:2P3D (these numbers), local-only (as many workers, all of them decode),"
    " script:0=1P1D+60=2P2D (numbers from these seconds on), oracle (knows all arrivals),"
    " oracle:0.8+0.9 (these shares of a prefill and a decode worker),"
    " planner (the shipped one), planner:down-window-s=120+tick-s=10 (with these options)"
)


def parse_counts(text: str) -> WorkerCounts:
    """Parses `2P3D`. Raises ConfigError."""
    found = _COUNTS.fullmatch(text.strip())
    counts = WorkerCounts(int(found[1]), int(found[2])) if found else None
    if counts is None or not (counts.prefill <= MOST_WORKERS and 0 < counts.decode <= MOST_WORKERS):
        raise ConfigError(
            [
                f"workers {text!r}; accepted: PREFILL and DECODE workers as in 2P3D, at least one"
                f" decode worker and at most {MOST_WORKERS} of each"
            ]
        )
    return counts


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all runs of a comparison share. most_workers: see `Bounds`."""

    requests: Sequence[TraceRequest]
    timing: Timing
    options: GraphModelOptions
    counts: WorkerCounts
    most_workers: int
    start_s: float
    #: Options of `planner`; None: its defaults, with `most_workers` as the budget, and `start_s`.
    planner: PlannerOptions | None = None


@dataclass(frozen=True)
class Variant:
    """One run of a comparison."""

    scaler: Scaler
    counts: WorkerCounts
    bounds: Bounds


def variant(name: str, setting: Setting) -> Variant:
    """Raises ConfigError for an unknown name."""
    kind, _, rest = name.strip().partition(":")
    fixed = Bounds(least=WorkerCounts(0, 1), most=2 * MOST_WORKERS)
    if kind == "static":
        counts = parse_counts(rest)
        return Variant(Static(counts), counts, fixed)
    if kind == "local-only" and not rest:
        counts = WorkerCounts(0, setting.counts.total)
        scaler = Static(counts)
        scaler.name = f"local-only:{counts.decode}D"
        return Variant(scaler, counts, fixed)
    if kind == "script":
        steps = [_step(name, part) for part in rest.split("+")]
        return Variant(Scripted(steps), min(steps, key=lambda step: step[0])[1], fixed)
    if kind == "oracle":
        least = WorkerCounts(1 if setting.counts.prefill else 0, 1)
        bounds = Bounds(least=least, most=max(setting.most_workers, least.total))
        scaler = Oracle(
            setting.requests,
            setting.timing,
            setting.options.slo,
            bounds,
            start_s=setting.start_s,
            remote_from=setting.options.thresholds.max_local_prefill_length,
            shares=_shares(name, rest),
        )
        scaler.name = name
        return Variant(scaler, scaler.at_start(), bounds)
    if kind == "planner":
        return _planner(name, rest, setting)
    raise ConfigError([f"--compare: {name!r} is unknown; accepted: {ACCEPTED}"])


def _shares(name: str, text: str) -> tuple[float, float]:
    """Parses `0.8+0.9`."""
    if not text:
        return ORACLE_SHARES
    try:
        prefill, decode = (float(part) for part in text.split("+"))
        if not (0.05 <= prefill <= 5 and 0.05 <= decode <= 5):
            raise ValueError
    except ValueError:
        raise ConfigError(
            [f"--compare: {name!r}: {text!r} is not two shares; accepted: {ACCEPTED}"]
        ) from None
    return prefill, decode


def _planner(name: str, changes: str, setting: Setting) -> Variant:
    """It begins with the setting's numbers."""
    limits = planner_limits(name, changes, setting)
    if mistakes := contradictions(limits):
        raise ConfigError([f"--compare: {name!r}: {mistake}" for mistake in mistakes])
    counts = setting.counts
    if counts.total > limits.budget_devices:
        raise ConfigError(
            [
                f"--compare: {name!r} begins with {counts.total} workers, and its budget-devices is"
                f" {limits.budget_devices}: raise that or --max-workers, or begin with fewer"
                " (--workers)"
            ]
        )
    scaler = PlannerScaler(limits, has_prefill=counts.prefill > 0, name=name)
    least = WorkerCounts(min(limits.prefill_min, counts.prefill), limits.decode_min)
    return Variant(scaler, counts, Bounds(least=least, most=limits.budget_devices))


def planner_limits(name: str, changes: str, setting: Setting) -> PlannerOptions:
    """The planner's options with `KEY=VALUE+KEY=VALUE`. Raises ConfigError."""
    most = setting.most_workers
    limits = setting.planner or PlannerOptions(
        budget_devices=most, prefill_max=most, decode_max=most, start_s=setting.start_s
    )
    options: dict[str, Any] = asdict(limits)
    for part in changes.split("+") if changes else ():
        key, _, value = part.partition("=")
        if (known := key.strip().replace("-", "_")) not in options:
            keys = ", ".join(sorted(one.replace("_", "-") for one in options))
            raise ConfigError([f"--compare: {name!r}: {key!r} is unknown; accepted: {keys}"])
        options[known] = value
    try:
        return msgspec.convert(options, PlannerOptions, strict=False)
    except msgspec.MsgspecError as exc:
        raise ConfigError([f"--compare: {name!r}: {exc}; accepted: {ACCEPTED}"]) from exc


def _step(name: str, part: str) -> tuple[float, WorkerCounts]:
    at, _, counts = part.partition("=")
    try:
        at_s = float(at)
        if not 0 <= at_s < 1e9:
            raise ValueError
    except ValueError:
        raise ConfigError(
            [f"--compare: {name!r}: {at!r} is not a time; accepted: {ACCEPTED}"]
        ) from None
    return at_s, parse_counts(counts)


def run_variant(
    one: Variant, setting: Setting, on_progress: Callable[[int, float], None] | None = None
) -> Result:
    run = Run(
        setting.requests,
        setting.timing,
        setting.options,
        one.scaler,
        one.counts,
        one.bounds,
        start_s=setting.start_s,
    )
    return run.run(on_progress)
