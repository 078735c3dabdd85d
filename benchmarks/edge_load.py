"""The highest load of streamed chat requests at which each HTTP edge gives first tokens in time."""

import argparse
import math
import os
import random
import resource
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict

import uvloop

from benchmarks.command import begin, given_path, parser_of, until_interrupted, write_json
from benchmarks.edge import KEPT, Server, alone, find_vllm_rs, graph, note_idle, rust_edge
from benchmarks.edge_load_report import (
    LIMIT_MS,
    MIN_CORES,
    MIN_RATIO,
    RUST,
    SYSTEMS,
    Round,
    Step,
    progress,
    report,
)
from benchmarks.graph import running_server
from benchmarks.ramp import TRIES, Ramp
from benchmarks.runtime import BODY, TOKENS, Meter
from benchmarks.streams import offer_load
from dynamo_lite.forward.protocols.base import CHAT
from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.vllm.edge_choice import PROGRAM

_WARM_UP_S = [number / 100 for number in range(64)]

_ABOUT = f"""\
Several systems are asked for streamed chat answers of {TOKENS} tokens. Requests come at random
times, the same for every system, whether or not those before are answered, and each on a
connection of its own. The engines behind compute nothing and make a step each --step-ms.

  python    a graph with one Frontend, `edge: python`
  python-2  a graph with two of them on one port
  plain     vLLM's own Python app over an engine in its process, without any transport
  rust      a graph with one Frontend, `edge: rust`
  alone     {PROGRAM} over an engine, without any Frontend

A load holds when no request fails and the p99 of the time to the first token is at most
{LIMIT_MS:g} ms, counted from the time at which the request was to be sent. The load is doubled
until one does not hold in {TRIES} tries, and then narrowed down to --precision. In a round all
systems search in turn, step by step, so that other load on the machine meets all of them. A
ratio compares two systems in the same round.

All systems run all the time; those that are not asked are idle. The client and the workers
share the cores with the edge. So the ratio of two Frontends to one, which is to be {MIN_RATIO:g},
needs at least {MIN_CORES} cores.

rust and alone need {PROGRAM} of the installed vLLM. scripts/get_vllm_rs downloads it (326 MB);
without it they are left out.
"""


def main() -> None:
    options = _options()
    _allow_connections()
    systems = _systems(options)
    rounds: list[Round] = []
    with until_interrupted():
        measure(systems, options, rounds)
    if rounds:
        report(rounds, options.most_load)
    write_json(options.json, [[asdict(step) for step in steps] for steps in rounds])


def _options() -> argparse.Namespace:
    parser = parser_of("edge_load", _ABOUT)
    parser.add_argument(
        "--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="default: all"
    )
    parser.add_argument("--rounds", type=_count, default=3, help="of all systems (default 3)")
    parser.add_argument(
        "--seconds", type=_positive, default=3.0, help="how long a load is offered (default 3)"
    )
    parser.add_argument(
        "--first-load", type=_positive, default=2000.0, help="in tokens/s (default 2000)"
    )
    parser.add_argument(
        "--most-load", type=_positive, default=1e6, help="the search ends there (default 1000000)"
    )
    parser.add_argument(
        "--precision", type=_positive, default=0.05, help="of the highest load (default 0.05)"
    )
    parser.add_argument("--step-ms", type=_positive, default=10.0, help="engine step (default 10)")
    parser.add_argument("--idle-s", type=_positive, default=3.0, help="idle time seen (default 3)")
    parser.add_argument(
        "--binary", type=given_path, help=f"{PROGRAM} (default: beside vLLM, or {KEPT})"
    )
    parser.add_argument("--quick", action="store_true", help="one round, loads of 2 seconds")
    options = begin(parser)
    if options.quick:
        options.rounds, options.seconds = 1, 2.0
    return options


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _allow_connections() -> None:
    """As many as the system lets this process and its children have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


Start = Callable[[ExitStack, float], Server]


def _systems(options: argparse.Namespace) -> list[Start]:
    """How those are started that were asked for and can be started. Exits if there are none."""
    starts: dict[str, Start] = {
        "python": lambda stack, step_s: graph(stack, "python", step_s),
        "python-2": lambda stack, step_s: graph(
            stack, "python-2", step_s, "--Frontend.ServiceArgs.workers=2"
        ),
        "plain": _plain,
    }
    if set(options.systems) & set(RUST):
        given = options.binary
        try:
            program = find_vllm_rs(None if given is None else str(given))
        except StartupError as exc:
            if given is not None:
                sys.exit(f"--binary: {exc}")
            print(f"left out: {', '.join(RUST)}: {exc}; scripts/get_vllm_rs downloads it")
        else:
            starts["rust"] = lambda stack, step_s: rust_edge(stack, program, step_s)
            starts["alone"] = lambda stack, step_s: alone(stack, program, step_s)
    chosen = [start for name, start in starts.items() if name in options.systems]
    if not chosen:
        sys.exit("no system is left to measure")
    return chosen


def _plain(stack: ExitStack, step_s: float) -> Server:
    pid, port = stack.enter_context(running_server("benchmarks.plain_app", f"{step_s:g}"))
    return Server("plain", port, python=(Meter(pid),))


def measure(systems: Sequence[Start], options: argparse.Namespace, rounds: list[Round]) -> None:
    with ExitStack() as stack:
        servers = [start(stack, options.step_ms / 1000) for start in systems]
        for server in servers:
            warm = uvloop.run(offer_load(server.port, CHAT, BODY, _WARM_UP_S))
            if warm.failures:
                sys.exit(f"{server.name} does not answer: {warm.failures[0]}")
        note_idle(servers, options.idle_s)
        for number in range(options.rounds):
            print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
            order = servers if number % 2 == 0 else servers[::-1]
            rounds.append(list(one_round(order, options)))


def one_round(servers: Sequence[Server], options: argparse.Namespace) -> Iterator[Step]:
    """All of them search in turn."""
    searches = [
        (server, Ramp(options.first_load, options.most_load, options.precision))
        for server in servers
    ]
    while searches:
        for server, ramp in searches:
            assert ramp.load is not None
            step = offer(server, ramp.load, options.seconds)
            print(progress(step), file=sys.stderr, flush=True)
            ramp.note(held=step.held)
            yield step
        searches = [one for one in searches if one[1].load is not None]


def offer(server: Server, load: float, seconds: float) -> Step:
    requests = max(2, round(seconds * load / TOKENS))
    rng = random.Random(requests)
    times_s = sorted(rng.uniform(0.0, seconds) for _ in range(requests))
    client = Meter(os.getpid())
    for meter in server.meters:
        meter.start()
    seen = uvloop.run(offer_load(server.port, CHAT, BODY, times_s))
    cpu_ms = sum(meter.used_ms() for meter in server.meters)
    first_s, ends_s = sorted(seen.seen.first_s), seen.ends_s
    # From end to end: at the beginning of a step no stream runs yet.
    span_s = ends_s[-1] - ends_s[0] if len(ends_s) > 1 else seen.seen.seconds
    return Step(
        system=server.name,
        offered=load,
        tokens_per_s=(len(ends_s) - 1) * TOKENS / span_s if ends_s else 0.0,
        first_ms=1000 * statistics.median(first_s) if first_s else None,
        first_p99_ms=1000 * first_s[int(0.99 * len(first_s))] if first_s else None,
        cpu_ms=cpu_ms / requests,
        client=client.used_ms() / 1000 / seen.seen.seconds,
        failed=len(seen.failures),
        why=seen.failures[0] if seen.failures else "",
    )


if __name__ == "__main__":
    main()
