"""Plots of what the benchmarks have written with --json."""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

_ABOUT = """\
Draws what it finds in the files that benchmarks.transfer, .streaming and .disagg have
written with --json: transfer.png, streaming.png, interference.png and ttft.png.
Points are medians; bars hold the middle half, or all where there are fewer than five.
"""

_MIB = 1 << 20
_DPI = 110
_SIZE = (7.5, 4.2)
_COLOURS = {
    "dynamo-lite": "#d1495b",
    "plain": "#30638e",
    "plain-256": "#8fb8de",
    "pull": "#edae49",
    "push": "#66a182",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plot",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("results", type=Path, nargs="+", help="files written with --json")
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"), help="folder")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for path in options.results:
        for kind, data in json.loads(path.read_text()).items():
            for name, draw in PLOTS[kind].items():
                target = options.out / f"{name}.png"
                figure, axes = plt.subplots(figsize=_SIZE, layout="constrained")
                draw(axes, data)
                axes.grid(alpha=0.3)
                figure.savefig(target, dpi=_DPI)
                plt.close(figure)
                print(target)


def transfer(axes: Any, jobs: list[dict[str, Any]]) -> None:
    """Bandwidth over the size of a job, of the model whose blocks are of middle size."""
    mine = [job for job in jobs if job["shape"] == "bench"]
    sizes = [job["bytes"] / _MIB for job in mine]
    for kind in mine[0]["seconds"]:
        speeds = [[job["bytes"] / s / 1e9 for s in job["seconds"][kind]] for job in mine]
        _line(axes, sizes, speeds, kind, "--" if kind in ("big", "memcpy") else "-")
    axes.set_xscale("log", base=2)
    axes.set(xlabel="MiB per job", ylabel="GB/s", ylim=(0, None))
    axes.set_title("KV blocks between two processes (12 layers, 32 KiB a block and layer)")
    axes.legend()


def streaming(axes: Any, lengths: list[dict[str, Any]]) -> None:
    for kind, label in (("on", "written chunk by chunk"), ("off", "written at the end")):
        mine = [length for length in lengths if length["kind"] == kind and length["handover"]]
        tokens = [length["tokens"] for length in mine]
        _line(axes, tokens, [length["handover"] for length in mine], label)
    axes.set(xlabel="prompt tokens", ylabel="ms", ylim=(0, None))
    axes.set_title("Handover outside the computing")
    axes.legend()


def interference(axes: Any, data: dict[str, Any]) -> None:
    """How often a stream waits how long for its next token, while long prompts come."""
    for name, runs in _by_system(data, "interference").items():
        rows = [run["itl_ms"]["quantiles"] for run in runs if "quantiles" in run["itl_ms"]]
        if rows:
            middles = [statistics.median(column) for column in zip(*rows, strict=True)]
            shares = [1 - i / (len(middles) - 1) for i in range(len(middles))]
            shares[-1] = 0.5 / (len(middles) - 1)
            axes.plot(middles, shares, label=name, color=_COLOURS.get(name))
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set(xlabel="ms to the next token", ylabel="share of tokens that take longer")
    axes.set_title("8 decoding streams while prompts of 2k to 4k tokens come")
    axes.legend()


def first_tokens(axes: Any, data: dict[str, Any]) -> None:
    for name, runs in _by_system(data, "unloaded").items():
        lengths = sorted({int(n) for run in runs for n in run["ttft_ms"]})
        rows = [[run["ttft_ms"][str(n)] for run in runs] for n in lengths]
        _line(axes, lengths, rows, name, colour=_COLOURS.get(name))
    axes.set(xlabel="prompt tokens", ylabel="ms", ylim=(0, None))
    axes.set_title("Time to first token, one prompt at a time")
    axes.legend()


def _by_system(data: dict[str, Any], workload: str) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for run in data["runs"]:
        if workload in run:
            found.setdefault(run["system"], []).append(run[workload])
    return found


def _line(
    axes: Any,
    where: list[Any],
    rows: list[list[float]],
    label: str,
    style: str = "-",
    colour: str | None = None,
) -> None:
    """Medians with their spread: all of few values, the middle half of many."""
    middles = [statistics.median(row) for row in rows]
    spans = [_span(row) for row in rows]
    below = [middle - low for middle, (low, _) in zip(middles, spans, strict=True)]
    above = [high - middle for middle, (_, high) in zip(middles, spans, strict=True)]
    axes.errorbar(
        where, middles, [below, above], fmt=f"o{style}", ms=3, capsize=2, label=label, color=colour
    )


def _span(row: list[float]) -> tuple[float, float]:
    if len(row) < 5:
        return min(row), max(row)
    low, _, high = statistics.quantiles(row, n=4)
    return low, high


#: What is in a file -> the plots of it.
PLOTS: dict[str, dict[str, Callable[[Any, Any], None]]] = {
    "transfer": {"transfer": transfer},
    "streaming": {"streaming": streaming},
    "disagg": {"interference": interference, "ttft": first_tokens},
}


if __name__ == "__main__":
    main()
