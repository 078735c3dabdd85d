"""What a Forwarder costs, beside vllm-router and vLLM's toy proxies."""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass

import uvloop

from benchmarks.command import begin, given_path, parser_of, until_interrupted, write_json
from benchmarks.figures import spread, verdict
from benchmarks.graph import running_graph, running_process
from benchmarks.runtime import Meter
from benchmarks.scripted_engines import MODEL, TOKENS
from benchmarks.streams import Streamed, stream_load
from benchmarks.systems import Started, find_router, router_process, started
from dynamo_lite.forward.protocols.base import COMPLETIONS
from dynamo_lite.serve.processes import free_port

MAX_CPU_RATIO = 1 / 3
MAX_ADDED_MS = 1.0

_IDLE_S = 3.0
_READY_S = 60.0
_PROMPT = "a prompt of some six hundred tokens is not long "
_BODY = {"model": MODEL, "prompt": _PROMPT * 60, "max_tokens": TOKENS, "temperature": 0}

_ABOUT = f"""\
The same streamed requests of {TOKENS} tokens through several HTTP servers, in turn. All stand
before the same two engines, which speak the handover protocol of NixlConnector and
compute nothing (`benchmarks.scripted_engines`):

  forwarder  graphs.forward:Forwarder, one process
  router     vllm-router from PyPI (Rust): --router names the program; without it, it is
             looked for on the PATH and in .dynamo-lite/peers; if there is none, it is
             left out
  toy, ...   proxies of vLLM's own repository with the options --port, --prefiller-port and
             --decoder-port, such as
             tests/v1/kv_connector/nixl_integration/toy_proxy_server.py: --toy names a file
  engine     no proxy: the client asks the decode engine, without a prefill leg

CPU is that of the server's process from /proc, less what it uses when idle. The ratios and
differences compare rounds that ran right after each other.
"""


@dataclass(frozen=True)
class Round:
    """One server at one concurrency. cpu_ms: per request; first_ms, first_p90_ms: the time to
    the first token; events: per answer."""

    server: str
    concurrency: int
    cpu_ms: float
    first_ms: float
    first_p90_ms: float
    tokens_per_s: float
    events: float


@dataclass(frozen=True)
class Server:
    name: str
    port: int
    meter: Meter


def main() -> None:
    parser = parser_of("forward", _ABOUT)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each kind (default 5)")
    parser.add_argument("--requests", type=int, default=160, help="per round (default 160)")
    parser.add_argument(
        "--concurrency",
        type=int,
        nargs="+",
        default=[1, 16, 64],
        help="requests at a time (default 1 16 64)",
    )
    parser.add_argument("--step-ms", type=float, default=10.0, help="engine step (default 10)")
    parser.add_argument("--router", default=find_router(), help="the program vllm-router")
    parser.add_argument(
        "--toy", action="append", default=[], type=given_path, help="a proxy's file; repeatable"
    )
    parser.add_argument("--quick", action="store_true", help="three rounds of 64 requests")
    options = begin(parser)
    if options.quick:
        options.rounds, options.requests = 3, 64
    rounds: list[Round] = []
    with until_interrupted():
        measure(options, rounds)
    if rounds:
        report(rounds)
    write_json(options.json, [asdict(one) for one in rounds])


def measure(options: argparse.Namespace, rounds: list[Round]) -> None:
    step_s = options.step_ms / 1000
    with ExitStack() as stack:
        servers = [stack.enter_context(one) for one in _servers(options, stack)]
        for server in servers:
            _load(server.port, step_s, 64, 16)
            server.meter.start()
        time.sleep(_IDLE_S)
        for server in servers:
            server.meter.note_idle()
        for number in range(options.rounds):
            for concurrency in options.concurrency:
                requests = max(options.requests, 2 * concurrency)
                if concurrency == 1:
                    requests //= 4  # one after the other they take long
                for server in servers if number % 2 else reversed(servers):
                    rounds.append(_round(server, step_s, requests, concurrency))


def _servers(
    options: argparse.Namespace, stack: ExitStack
) -> Iterator[AbstractContextManager[Server]]:
    command = [sys.executable, "-m", "benchmarks.scripted_engines", f"{options.step_ms:g}"]
    pid, ports = stack.enter_context(running_process(command))
    prefill, decode = (int(port) for port in ports)
    yield _forwarder(prefill, decode)
    if options.router:
        urls = f"--prefill http://127.0.0.1:{prefill} --decode http://127.0.0.1:{decode}".split()
        flags = ["--vllm-pd-disaggregation", *urls, "--policy", "round_robin"]
        yield _proxy("router", router_process(options.router, flags))
    for number, file in enumerate(options.toy):
        port = free_port()
        where = [f"--prefiller-port={prefill}", f"--decoder-port={decode}"]
        hosts = ["--prefiller-host=127.0.0.1", "--decoder-host=127.0.0.1"]
        command = [sys.executable, str(file), f"--port={port}", *where, *hosts]
        yield _proxy(f"toy{number + 1}", started(command, port))
    yield nullcontext(Server("engine", decode, Meter(pid)))


@contextmanager
def _forwarder(prefill: int, decode: int) -> Iterator[Server]:
    engines = ", ".join(
        f'{{url: "http://127.0.0.1:{port}", role: {role}}}'
        for port, role in ((prefill, "prefill"), (decode, "decode"))
    )
    options = [f"--Forwarder.engines=[{engines}]"]
    with running_graph(
        "graphs.forward:Forwarder", "configs/forward_nixl.yaml", *options, http="Forwarder"
    ) as graph:
        process = graph.process("Forwarder")
        _until_it_answers(graph.port)
        yield Server("forwarder", graph.port, Meter(process.pid))


@contextmanager
def _proxy(name: str, starting: AbstractContextManager[Started]) -> Iterator[Server]:
    with starting as process:
        try:
            _until_it_answers(process.port)
        except TimeoutError:
            sys.exit(f"{name} did not come up:\n{process.tail()}")
        yield Server(name, process.port, Meter(process.process.pid))


def _until_it_answers(port: int) -> None:
    """Raises TimeoutError."""
    deadline = time.monotonic() + _READY_S
    while True:
        try:
            _load(port, 0.0, 1, 1)
            return
        except* (RuntimeError, OSError):
            if time.monotonic() > deadline:
                raise TimeoutError from None
        time.sleep(0.1)


def _load(port: int, step_s: float, requests: int, concurrency: int) -> Streamed:
    load = stream_load(
        port,
        COMPLETIONS,
        _BODY,
        requests=requests,
        concurrency=concurrency,
        spread_s=TOKENS * step_s,
    )
    return uvloop.run(load)


def _round(server: Server, step_s: float, requests: int, concurrency: int) -> Round:
    server.meter.start()
    seen = _load(server.port, step_s, requests, concurrency)
    first = sorted(seen.first_s)
    one = Round(
        server=server.name,
        concurrency=concurrency,
        cpu_ms=server.meter.used_ms() / requests,
        first_ms=1000 * statistics.median(first),
        first_p90_ms=1000 * first[int(0.9 * len(first))],
        tokens_per_s=requests * TOKENS / seen.seconds,
        events=seen.events / requests,
    )
    print(
        f"{one.server:10}{concurrency:4} {one.cpu_ms:8.2f} ms CPU"
        f" {one.first_ms:8.2f} ms to the first token",
        file=sys.stderr,
        flush=True,
    )
    return one


def report(rounds: Sequence[Round]) -> None:
    names = list(dict.fromkeys(one.server for one in rounds))
    print(f"streamed {TOKENS}-token requests; median (lowest to highest)\n")
    print(f"{'at a time':>9} {'server':10}{'CPU ms a request':>24}{'first token, ms':>24}", end="")
    print(f"{'p90':>8}{'tokens/s':>10}{'events':>8}")
    for concurrency in sorted({one.concurrency for one in rounds}):
        for name in names:
            mine = _of(rounds, name, concurrency)
            # The scripted engines' own cost, with their idle steps, says nothing.
            cpu = "-" if name == "engine" else spread([one.cpu_ms for one in mine])
            print(
                f"{concurrency:9} {name:10}{cpu:>24}"
                f"{spread([one.first_ms for one in mine]):>24}"
                f"{statistics.median(one.first_p90_ms for one in mine):8.2f}"
                f"{statistics.median(one.tokens_per_s for one in mine):10.0f}"
                f"{statistics.median(one.events for one in mine):8.1f}"
            )
    for concurrency in sorted({one.concurrency for one in rounds}):
        for name in names:
            if name not in ("forwarder", "engine"):
                print("\n".join(_beside(rounds, name, concurrency)))


def _beside(rounds: Sequence[Round], name: str, concurrency: int) -> Iterator[str]:
    pairs = list(
        zip(_of(rounds, "forwarder", concurrency), _of(rounds, name, concurrency), strict=False)
    )
    ratios = [mine.cpu_ms / other.cpu_ms for mine, other in pairs]
    added = [mine.first_ms - other.first_ms for mine, other in pairs]
    toy = name.startswith("toy")
    yield (
        f"{concurrency:9} CPU, forwarder / {name}: {spread(ratios)} x"
        + _verdict(statistics.median(ratios), MAX_CPU_RATIO, toy)
    )
    yield (
        f"{concurrency:9} first token, forwarder - {name}: {spread(added)} ms"
        + _verdict(statistics.median(added), MAX_ADDED_MS, not toy and concurrency == 16)
    )


def _verdict(value: float, target: float, is_target: bool) -> str:
    return verdict(value <= target, target) * is_target


def _of(rounds: Sequence[Round], name: str, concurrency: int) -> list[Round]:
    return [one for one in rounds if (one.server, one.concurrency) == (name, concurrency)]


if __name__ == "__main__":
    main()
