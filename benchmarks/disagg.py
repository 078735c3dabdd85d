"""End to end: what long prompts do to decoding streams, beside other ways to serve two engines."""

import argparse
import asyncio
import os
import platform
import sys
import time
from contextlib import suppress

import psutil

from benchmarks import systems, workloads
from benchmarks.command import begin, parser_of, until_interrupted, write_json
from benchmarks.disagg_report import report
from benchmarks.graph import make_bench_model

_IDLE_SETTLE_S = 3.0
_IDLE_S = 5.0

_ABOUT = f"""\
Every system serves the same random Llama of 119 million parameters with
two engines, one pinned to each core, behind one HTTP port; the same client, engine
arguments and prompts. A round starts each in turn, asks it, and ends it.

  dynamo-lite  this project: prefill engine and decode engine, prompts of more than
               256 tokens go to the first (benchmarks/disagg.yaml)
  plain        two `vllm serve` behind vllm-router, round-robin
  plain-256    the same with chunks of 256 tokens, not 2048: gentler to the streams
  pull         vLLM's NixlConnector behind vllm-router, prefill/decode
  push         vLLM's NixlPushConnector behind benchmarks/proxy.py

vllm-router is looked for on the PATH and in .dynamo-lite/peers/bin:

    python3 -m venv .dynamo-lite/peers && .dynamo-lite/peers/bin/pip install vllm-router

Without it benchmarks/proxy.py stands in, and the output says so.

  interference  {workloads.STREAMS} streams of {workloads.STREAM_PROMPT} tokens in, \
{workloads.STREAM_TOKENS} out without a pause; then also prompts
                of {", ".join(map(str, workloads.LONG_PROMPTS))} tokens, one after another
  unloaded      time to first token of one prompt at a time
  mix           {workloads.MIX_CLIENTS} clients, a quarter of the prompts long

ITL is the time between two streamed events of an answer. Tokens per second counts
prompts and output. CPU is that of all processes of the system, client excluded.
"""


def main() -> None:
    parser = parser_of("disagg", _ABOUT)
    parser.add_argument("--rounds", type=int, help="of all systems (default 3; 1 with --quick)")
    parser.add_argument(
        "--systems",
        nargs="+",
        choices=list(systems.SYSTEMS),
        default=["dynamo-lite", "plain", "pull", "push"],
        help="those to compare (default: all but plain-256)",
    )
    parser.add_argument(
        "--workloads",
        nargs="+",
        choices=list(workloads.WORKLOADS),
        default=list(workloads.WORKLOADS),
        help="default: all",
    )
    parser.add_argument("--router", help="vllm-router's program")
    systems.add_dtype(parser)
    parser.add_argument("--quick", action="store_true", help="a minute per system, for trying")
    options = begin(parser)
    make_bench_model()
    results = Results(options)
    with until_interrupted():
        results.measure()
    report(results.data)


class Results:
    """Runs rounds, and keeps what they have found; the file is whole after each run."""

    def __init__(self, options: argparse.Namespace):
        self._options = options
        self._setup = systems.Setup(options.router or systems.find_router(), options.dtype)
        self._rounds = options.rounds or (1 if options.quick else 3)
        self._sizes = workloads.QUICK if options.quick else workloads.FULL
        self.data: dict = {
            "machine": f"{psutil.cpu_count()} cores, {platform.machine()}",
            "router": bool(self._setup.router),
            "dtype": options.dtype,
            "quick": options.quick,
            "runs": [],
        }

    def measure(self) -> None:
        todo = [(n, name) for n in range(self._rounds) for name in self._turn(n)]
        started = time.monotonic()
        for done, (number, name) in enumerate(todo):
            left = (time.monotonic() - started) / done * (len(todo) - done) if done else 0.0
            guess = f", about {left / 60:.0f} min left" if done else ""
            _say(f"round {number + 1} of {self._rounds}: {name}{guess}")
            run = {"system": name, "round": number, "load_before": os.getloadavg()[0]}
            try:
                self._run(name, number, run)
            except (RuntimeError, SystemExit, TimeoutError, ExceptionGroup) as exc:
                run["error"] = _why(exc)
                _say(f"  failed: {run['error']}")
            self.data["runs"].append(run)
            write_json(self._options.json, {"disagg": self.data})

    def _turn(self, number: int) -> list[str]:
        """Another one begins in each round."""
        names, at = self._options.systems, number % len(self._options.systems)
        return [*names[at:], *names[:at]]

    def _run(self, name: str, number: int, run: dict) -> None:
        with systems.SYSTEMS[name](self._setup) as system:
            asyncio.run(workloads.warm_up(system.port, seed=1000 + number))
            time.sleep(_IDLE_SETTLE_S)
            before = cpu_s(system.pids)
            time.sleep(_IDLE_S)
            run["idle_cores"] = (cpu_s(system.pids) - before) / _IDLE_S
            for workload in self._options.workloads:
                _say(f"  {workload}")
                before, started = cpu_s(system.pids), time.monotonic()
                ask = workloads.WORKLOADS[workload](system.port, self._sizes, seed=number)
                run[workload] = asyncio.run(ask)
                run[workload]["cpu_s"] = cpu_s(system.pids) - before
                run[workload]["wall_s"] = time.monotonic() - started


def cpu_s(pids: tuple[int, ...]) -> float:
    """CPU time of these processes and all below them."""
    total = 0.0
    for pid in pids:
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
    return total


def _why(exc: BaseException) -> str:
    while isinstance(exc, ExceptionGroup):
        exc = exc.exceptions[0]
    return f"{type(exc).__name__}: {exc}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
