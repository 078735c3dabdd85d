"""What `edge_load.py` has found, as text."""

import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.figures import spread
from benchmarks.runtime import TOKENS

RUST = ("rust", "alone")
SYSTEMS = ("python", "python-2", "plain", *RUST)
#: Others are compared with these.
_BASES = ("python", "plain", "alone")

LIMIT_MS = 100.0
MIN_RATIO = 1.8
#: For two Frontends, their worker and the client.
MIN_CORES = 4
#: Share of a core from which the client may be what is slow.
_BUSY_CLIENT = 0.8


@dataclass(frozen=True)
class Step:
    """One load offered to one system.

    offered, tokens_per_s: tokens per second, asked for and delivered. first_ms, first_p99_ms: time
    to the first token, None if no request was answered. cpu_ms: of the edge's processes, per
    request. client: share of a core that the client used. failed: requests; why: the first of them.
    """

    system: str
    offered: float
    tokens_per_s: float
    first_ms: float | None
    first_p99_ms: float | None
    cpu_ms: float
    client: float
    failed: int
    why: str

    @property
    def held(self) -> bool:
        return not self.failed and self.first_p99_ms is not None and self.first_p99_ms <= LIMIT_MS


#: The steps of one round, in their order.
Round = list[Step]


def progress(step: Step) -> str:
    p99 = "-" if step.first_p99_ms is None else f"{step.first_p99_ms:.0f} ms"
    text = f"{step.system:10}{step.offered:9,.0f} tokens/s offered, first token p99 {p99:>8}"
    if step.failed:
        text += f", {step.failed} failed: {step.why}"
    return f"{text}   {'held' if step.held else 'not held'}"


def report(rounds: Sequence[Round], most_load: float) -> None:
    """most_load: the highest that was allowed to be offered, in tokens/s."""
    found = {step.system for steps in rounds for step in steps}
    best = {name: [_highest(steps, name) for steps in rounds] for name in SYSTEMS if name in found}
    bases = [name for name in _BASES if name in best]
    cores = len(os.sched_getaffinity(0))
    print(f"highest load with a p99 time to the first token of at most {LIMIT_MS:g} ms;")
    print(f"streamed {TOKENS}-token chat requests, {cores} cores; median (lowest to highest)\n")
    print(f"{'system':10}{'tokens/s':>26}{'first token ms':>16}{'p99':>6}", end="")
    print(f"{'CPU ms a request':>18}" + "".join(f"{'/ ' + base:>22}" for base in bases))
    for name, steps in best.items():
        ratios = "".join(f"{spread(_ratios(steps, best[base])):>22}" for base in bases)
        print(f"{name:10}{_figures([step for step in steps if step is not None])}{ratios}")
    print()
    for line in _notes(best, cores, most_load):
        print(line)


def _highest(steps: Round, name: str) -> Step | None:
    """The step of this system with the highest load that has held."""
    held = [step for step in steps if step.system == name and step.held]
    return max(held, key=lambda step: step.offered, default=None)


def _figures(steps: Sequence[Step]) -> str:
    if not steps:
        return f"{'-':>26}{'-':>16}{'-':>6}{'-':>18}"
    speeds = [step.tokens_per_s for step in steps]
    speed = f"{statistics.median(speeds):,.0f} ({min(speeds):,.0f} to {max(speeds):,.0f})"
    first_ms = statistics.median(step.first_ms or 0.0 for step in steps)
    p99_ms = statistics.median(step.first_p99_ms or 0.0 for step in steps)
    cpu_ms = statistics.median(step.cpu_ms for step in steps)
    return f"{speed:>26}{first_ms:16.0f}{p99_ms:6.0f}{cpu_ms:18.2f}"


def _ratios(steps: Sequence[Step | None], bases: Sequence[Step | None]) -> list[float]:
    """Of the rounds in which both have held a load."""
    pairs = zip(steps, bases, strict=True)
    return [one.tokens_per_s / base.tokens_per_s for one, base in pairs if one and base]


def _notes(best: dict[str, list[Step | None]], cores: int, most_load: float) -> Iterator[str]:
    for name, steps in best.items():
        held = [step for step in steps if step is not None]
        if len(held) < len(steps):
            yield f"{name}: no load held in {len(steps) - len(held)} of {len(steps)} rounds"
        if any(step.client > _BUSY_CLIENT for step in held):
            yield f"{name}: the client used most of a core; the edge may hold more"
        if any(step.offered >= most_load for step in held):
            yield f"{name}: held the highest load that was offered (--most-load)"
    if "python" not in best or "python-2" not in best:
        return
    if ratios := _ratios(best["python-2"], best["python"]):
        met = statistics.median(ratios) >= MIN_RATIO
        missed = "MISSED" if cores >= MIN_CORES else f"cannot be shown on {cores} cores"
        verdict = f"target {MIN_RATIO:g}: {'met' if met else missed}"
        yield f"python-2 / python: {spread(ratios)} x   {verdict}"
