"""The KV index of the router, beside the Rust indexer of ai-dynamo-runtime."""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.command import parser_of, write_json
from benchmarks.graph import ROOT
from benchmarks.router_index import BLOCK_TOKENS, PROMPT_BLOCKS, WORKERS

_ABOUT = f"""\
Fills an index with the blocks of {WORKERS} workers, by messages as they come from the network,
and asks it for the longest prefixes of prompts of {BLOCK_TOKENS * PROMPT_BLOCKS} tokens, in
blocks of {BLOCK_TOKENS}: a third of them is held, of a third only a system prompt that all
workers share, and of a third nothing. Each system runs in a process of its own, in turn.

The peer is the RadixTree of ai-dynamo-runtime, through its Python binding. Put it into an
environment of its own, and say where that is:

  python3 -m venv .dynamo-lite/peers && .dynamo-lite/peers/bin/pip install ai-dynamo-runtime
  python -m benchmarks.router --peer .dynamo-lite/peers/bin/python

Times are those of single calls, the mean of the middle half of them.
"""

#: Name, heading, target of ours / peer's; None: no target.
_ROWS = (
    ("matches_per_s", "prefixes matched, per s", 2.0),
    ("stored_per_s", "stored events (48 to 64 blocks) applied, per s", 0.5),
    ("removed_per_s", "removed events (8 blocks) applied, per s", 0.5),
    ("hash_us", "hashing a prompt's tokens, us", None),
    ("leave_us", "a worker leaves, us", None),
    ("memory_mib", "memory of the index, MiB", None),
)


def main() -> None:
    parser = parser_of("router", _ABOUT)
    parser.add_argument("--peer", type=Path, help="the Python of an environment with the peer")
    parser.add_argument(
        "--blocks", type=int, default=1_000_000, help="in the index (default 1000000)"
    )
    parser.add_argument(
        "--questions", type=int, default=6000, help="prompts asked for (default 6000)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="of each system (default 3)")
    parser.add_argument("--quick", action="store_true", help="one round of 100000 blocks")
    options = parser.parse_args()
    if options.quick:
        options.blocks, options.rounds = 100_000, 1
    pythons = {"ours": Path(sys.executable)}
    if options.peer:
        pythons["peer"] = options.peer.absolute()
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in pythons}
    for number in range(options.rounds):
        for name, python in pythons.items():
            print(f"round {number + 1}: {name}", file=sys.stderr)
            rounds[name].append(run(name, python, options))
    report({name: _medians(found) for name, found in rounds.items()})
    write_json(options.json, rounds)


def run(name: str, python: Path, options: argparse.Namespace) -> dict[str, float]:
    command = [str(python), "-m", "benchmarks.router_index", name]
    command += ["--blocks", str(options.blocks), "--questions", str(options.questions)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE
    )
    if done.returncode:
        sys.exit(f"{name} failed with exit code {done.returncode}")
    return json.loads(done.stdout)


def _medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(found[key] for found in rounds) for key in rounds[0]}


def report(found: dict[str, dict[str, float]]) -> None:
    ours, peer = found["ours"], found.get("peer")
    for key, heading, target in _ROWS:
        line = f"{heading:50s} {ours[key]:12,.0f}"
        if peer is not None:
            line += f" {peer[key]:12,.0f}  {ours[key] / peer[key]:6.2f} x"
            if target is not None:
                line += f"  (target {target:g} x)"
        print(line)
    if peer is None:
        print("the peer was left out: see --peer")


if __name__ == "__main__":
    main()
