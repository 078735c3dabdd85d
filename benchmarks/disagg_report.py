"""The tables of benchmarks/disagg.py, and whether its targets are met.

    python -m benchmarks.disagg_report FILE [--markdown]

prints them again from what `benchmarks.disagg --json FILE` has written; with
--markdown the table of docs/performance.md.
"""

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

MAX_ITL_GROWTH = 1.3
MAX_TTFT_RATIO = 1.05
MAX_IDLE_CORES = 0.2
LONG_TOKENS = 1000
OURS = "dynamo-lite"

Run = dict
Read = Callable[[Run], float | None]


def report(data: dict) -> None:
    runs: list[Run] = [run for run in data["runs"] if "error" not in run]
    names = list(dict.fromkeys(run["system"] for run in data["runs"]))
    rounds = max((run["round"] for run in data["runs"]), default=-1) + 1
    print(f"{data['machine']}; median (lowest to highest) of {rounds} rounds")
    if not data["router"]:
        print("vllm-router was not found: benchmarks/proxy.py stands in for it")
    for run in data["runs"]:
        if "error" in run:
            print(f"{run['system']}, round {run['round'] + 1}: not measured: {run['error']}")
    print(f"\n{'':34}" + "".join(f"{name:>26}" for name in names))
    for label, read in rows(runs):
        cells = [cell([read(run) for run in runs if run["system"] == name]) for name in names]
        if any(value != "-" for value in cells):
            print(f"{label:34}" + "".join(f"{value:>26}" for value in cells))
    print()
    for line in verdicts(runs, names):
        print(line)


def markdown(data: dict) -> None:
    runs: list[Run] = [run for run in data["runs"] if "error" not in run]
    names = list(dict.fromkeys(run["system"] for run in runs))
    print(f"| | {' | '.join(names)} |\n|---|{'---|' * len(names)}")
    for label, read in rows(runs):
        cells = [cell([read(run) for run in runs if run["system"] == name]) for name in names]
        if any(value != "-" for value in cells):
            print(f"| {label} | {' | '.join(cells)} |")


def rows(runs: list[Run]) -> list[tuple[str, Read]]:
    found: list[tuple[str, Read]] = [("idle, cores", lambda run: run.get("idle_cores"))]
    for label, key in (("streams alone", "calm_itl_ms"), ("with long prompts", "itl_ms")):
        found += [
            (f"ITL {point} ms, {label}", at("interference", key, point))
            for point in ("p50", "p95", "p99", "max")
        ]
    found += [
        ("tokens/s, streams alone", at("interference", "calm_tokens_per_s")),
        ("tokens/s, with long prompts", at("interference", "tokens_per_s")),
        ("long prompts answered", at("interference", "long_prompts")),
        ("their TTFT, ms", lambda run: middle(every(run, "interference", "long_ttft_ms"))),
        ("CPU s, streams and prompts", at("interference", "cpu_s")),
    ]
    lengths = {key: 0 for run in runs for key in run.get("unloaded", {}).get("ttft_ms", {})}
    found += [(f"TTFT ms, {n} tokens, unloaded", at("unloaded", "ttft_ms", n)) for n in lengths]
    found += [
        ("mix: TTFT ms, short prompts", lambda run: middle(values(run, "mix", "short_ttft_ms"))),
        ("mix: highest", lambda run: max(values(run, "mix", "short_ttft_ms"), default=None)),
        ("mix: TTFT ms, long prompts", lambda run: middle(values(run, "mix", "long_ttft_ms"))),
        ("mix: ITL p99 ms", at("mix", "itl_ms", "p99")),
        ("mix: tokens/s", at("mix", "tokens_per_s")),
        ("mix: CPU s", at("mix", "cpu_s")),
    ]
    return found


def verdicts(runs: list[Run], names: list[str]) -> list[str]:
    """One line per target that can be judged."""
    ours = {run["round"]: run for run in runs if run["system"] == OURS}
    peers = [name for name in names if name != OURS]
    found: list[str] = []
    p99, calm = at("interference", "itl_ms", "p99"), at("interference", "calm_itl_ms", "p99")
    growth = [p99(r) / calm(r) for r in ours.values() if p99(r) and calm(r)]
    if growth:
        found.append(_verdict("ITL p99 with long prompts / alone", growth, "<=", MAX_ITL_GROWTH))
    for name in peers:
        pairs = [(ours[r["round"]], r) for r in runs if r["system"] == name and r["round"] in ours]
        lower = [p99(a) / p99(b) for a, b in pairs if p99(a) and p99(b)]
        if lower:
            found.append(_verdict(f"ITL p99 / that of {name}", lower, "<=", 1.0))
        rate = at("interference", "tokens_per_s")
        more = [rate(a) / rate(b) for a, b in pairs if rate(a) and rate(b)]
        if more:
            found.append(_verdict(f"tokens/s / those of {name}", more, ">=", 1.0))
        if name == "plain":
            found += _first_tokens(pairs)
    idle = [run["idle_cores"] for run in ours.values() if "idle_cores" in run]
    if idle:
        found.append(_verdict("idle cores", idle, "<=", MAX_IDLE_CORES))
    return found


def _first_tokens(pairs: list[tuple[Run, Run]]) -> list[str]:
    lengths = pairs[0][0].get("unloaded", {}).get("ttft_ms", {}) if pairs else {}
    found: list[str] = []
    for tokens in lengths:
        if int(tokens) < LONG_TOKENS:
            continue
        read = at("unloaded", "ttft_ms", tokens)
        ratios = [read(a) / read(b) for a, b in pairs if read(a) and read(b)]
        if ratios:
            label = f"unloaded TTFT at {tokens} / plain"
            found.append(_verdict(label, ratios, "<=", MAX_TTFT_RATIO))
    return found


def _verdict(label: str, ratios: list[float], sign: str, target: float) -> str:
    value = statistics.median(ratios)
    met = value <= target if sign == "<=" else value >= target
    verdict = "met" if met else "MISSED"
    return f"{label:36}{cell(list(ratios)):>26}   target {sign} {target:g}: {verdict}"


def at(*path: str) -> Callable[[Run], float | None]:
    """Reads a number that lies at this path, if it is there."""

    def read(run: Run) -> float | None:
        found: object = run
        for key in path:
            found = found.get(key) if isinstance(found, dict) else None
        return found if isinstance(found, int | float) else None

    return read


def values(run: Run, *path: str) -> list[float]:
    found: object = run
    for key in path:
        found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, list) else []


def every(run: Run, workload: str, key: str) -> list[float]:
    by_length = run.get(workload, {}).get(key, {})
    return [value for found in by_length.values() for value in found]


def middle(found: list[float]) -> float | None:
    return statistics.median(found) if found else None


def cell(found: list[float | None]) -> str:
    numbers = [value for value in found if value is not None]
    if not numbers:
        return "-"
    texts = [f"{value:.{_digits(value)}f}" for value in (min(numbers), max(numbers))]
    value = statistics.median(numbers)
    spread = f" ({texts[0]}-{texts[1]})" if len(numbers) > 1 else ""
    return f"{value:.{_digits(value)}f}{spread}"


def _digits(value: float) -> int:
    return 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0


if __name__ == "__main__":
    found = json.loads(Path(sys.argv[1]).read_text())["disagg"]
    markdown(found) if "--markdown" in sys.argv[2:] else report(found)
