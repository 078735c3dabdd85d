"""What the default graph costs while nobody asks it anything."""

import time
from dataclasses import asdict, dataclass

import psutil

from benchmarks.command import begin, parser_of, write_json
from benchmarks.figures import verdict
from benchmarks.graph import RunningGraph, running_graph

MAX_CPU_PERCENT = 5.0
MAX_RSS_MIB = 4096

_SETTLE_S = 5.0
_MIB = 1 << 20

_ABOUT = """\
Starts the graph of `make serve`, waits until it is ready and has settled, and
reads from /proc what every process (engines, nats-server and etcd included) used
over --seconds: CPU in percent of one core, and resident memory. RSS counts pages
that processes share once for each; PSS, beside it, once in all.
"""


@dataclass(frozen=True)
class Row:
    name: str
    pid: int
    cpu_percent: float
    rss_mib: float
    pss_mib: float


def main() -> None:
    parser = parser_of("idle", _ABOUT)
    parser.add_argument("--seconds", type=float, default=10.0, help="observed time (default 10)")
    options = begin(parser)
    with running_graph("graphs.disagg:Frontend", "configs/disagg.yaml") as graph:
        time.sleep(_SETTLE_S)
        rows = observe(graph, options.seconds)
    report(rows, options.seconds)
    write_json(options.json, [asdict(row) for row in rows])


def observe(graph: RunningGraph, seconds: float) -> list[Row]:
    root = psutil.Process(graph.pid)
    processes = [root, *root.children(recursive=True)]
    before = [_cpu_s(process) for process in processes]
    started = time.monotonic()
    time.sleep(seconds)
    after = [_cpu_s(process) for process in processes]
    elapsed = time.monotonic() - started
    services = {state.pid: state.service for state in graph.run.processes}
    rows: list[Row] = []
    for process, old, new in zip(processes, before, after, strict=True):
        memory = process.memory_full_info()
        rows.append(
            Row(
                name=_name(process, services, graph.pid),
                pid=process.pid,
                cpu_percent=100 * (new - old) / elapsed,
                rss_mib=memory.rss / _MIB,
                pss_mib=memory.pss / _MIB,
            )
        )
    return rows


def _name(process: psutil.Process, services: dict[int, str], supervisor: int) -> str:
    if process.pid == supervisor:
        return "supervisor"
    if process.pid in services:
        return services[process.pid]
    parent = services.get(process.ppid(), "")
    return f"{parent} {process.name()}".strip()


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def report(rows: list[Row], seconds: float) -> None:
    print(f"the idle default graph over {seconds:g} s\n")
    print(f"{'process':34}{'CPU %':>8}{'RSS MiB':>10}{'PSS MiB':>10}")
    for row in rows:
        print(f"{row.name:34}{row.cpu_percent:8.1f}{row.rss_mib:10.0f}{row.pss_mib:10.0f}")
    rss = sum(row.rss_mib for row in rows)
    pss = sum(row.pss_mib for row in rows)
    cpu = sum(row.cpu_percent for row in rows)
    print(f"{'in all':34}{cpu:8.1f}{rss:10.0f}{pss:10.0f}\n")
    busiest = max(row.cpu_percent for row in rows)
    met = busiest <= MAX_CPU_PERCENT
    print(f"busiest process {busiest:.1f} %{verdict(met, MAX_CPU_PERCENT)}")
    print(f"RSS in all {rss:.0f} MiB{verdict(rss <= MAX_RSS_MIB, MAX_RSS_MIB)}")


if __name__ == "__main__":
    main()
