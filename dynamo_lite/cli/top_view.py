"""Renders an `Overview` as a terminal frame; readable with 80 columns or more."""

import time
from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dynamo_lite.cli.listing import as_next_try, as_time
from dynamo_lite.overview.compose import ELSEWHERE
from dynamo_lite.overview.model import Latency, Overview, Planned, RoleEngines

_NOTHING = "-"
_STATES = {"ready": "green", "starting": "yellow", "draining": "yellow"}
_WRONG = "bold red"


def as_frame(seen: Overview) -> RenderableType:
    """All sections, separated by empty lines."""
    parts: list[RenderableType] = [_headline(seen)]
    parts += [Text(f"! {sentence}", style=_WRONG) for sentence in seen.trouble]
    for section in (_workers(seen), _flow(seen), _decisions(seen), _failed_links(seen)):
        parts += ["", section]
    if seen.planner is not None:
        parts += ["", _planner(seen.planner)]
    return Group(*parts)


def _headline(seen: Overview) -> Text:
    clock = time.strftime("%H:%M:%S", time.localtime(seen.at))
    window = f"rates over {seen.rate_s:g} s, latencies over {seen.latency_s:g} s"
    return Text.assemble(("dynamo-lite top", "bold"), f"  {seen.namespace}  {clock}  {window}")


def _table(columns: Sequence[str], numbers: Iterable[str] = ()) -> Table:
    """numbers: columns that are right-aligned."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    right = set(numbers)
    for name in columns:
        justify = "right" if name in right else "left"
        table.add_column(name, justify=justify, no_wrap=True, overflow="ellipsis")
    return table


def _workers(seen: Overview) -> RenderableType:
    if not seen.workers:
        return Text("no live workers", style="yellow")
    numbers = ("RUNNING", "WAITING", "KV USE")
    table = _table(("WORKER", "LEASE", "STATE", "MODEL", *numbers), numbers)
    for worker in seen.workers:
        instance = _NOTHING if worker.instance is None else worker.instance
        table.add_row(
            f"{worker.component}-{instance}",
            worker.lease,
            _state(worker.state),
            worker.model or _NOTHING,
            _count(worker.running),
            _count(worker.waiting),
            _NOTHING if worker.kv_usage is None else f"{worker.kv_usage:.0%}",
        )
    return table


def _flow(seen: Overview) -> RenderableType:
    """Requests, queue, transfers and latencies."""
    table = Table.grid(padding=(0, 2))
    jobs = _count(seen.queue.jobs)
    tokens = "" if seen.queue.tokens is None else f", {seen.queue.tokens:,} tokens"
    moved = seen.transfers
    table.add_row("requests", f"{_count(seen.in_flight)} in flight")
    if seen.engines:
        table.add_row("engines", ", ".join(_engines(each) for each in seen.engines))
    table.add_row("queue", f"{jobs} {'job' if seen.queue.jobs == 1 else 'jobs'}{tokens}")
    speed = f"{as_bytes(moved.bytes_per_s)}/s, {moved.jobs_per_s:.1f} jobs/s"
    whole = f"{as_bytes(moved.total_bytes)} in {moved.total_jobs:,} jobs"
    table.add_row("transfers", speed, whole)
    table.add_row("TTFT", *_latency(seen.ttft))
    table.add_row("ITL", *_latency(seen.itl))
    return table


def _engines(of_role: RoleEngines) -> str:
    return f"{of_role.role} {of_role.usable} of {of_role.known} usable"


def _latency(latency: Latency) -> tuple[str, str]:
    if latency.p50_s is None or latency.p95_s is None:
        return _NOTHING, ""
    quantiles = f"p50 {as_time(latency.p50_s)}, p95 {as_time(latency.p95_s)}"
    return quantiles, f"of {latency.count:,}"


def _decisions(seen: Overview) -> RenderableType:
    if not seen.decisions:
        return Text("no decisions yet", style="dim")
    table = _table(("DECISIONS", "REASON", "PER S", "TOTAL"), ("PER S", "TOTAL"))
    for each in seen.decisions:
        style = "bold cyan" if each.verdict in ELSEWHERE and each.per_s else ""
        table.add_row(
            each.verdict, each.reason, f"{each.per_s:.1f}", f"{each.total:,}", style=style
        )
    return table


def _failed_links(seen: Overview) -> RenderableType:
    if not seen.failed_links:
        return Text("no failed links", style="dim")
    table = _table(("PREFILL", "DECODE", "NEXT TRY", "FAILED LINK"))
    for link in seen.failed_links:
        row = link.prefill, link.decode, as_next_try(link.next_try), link.detail
        table.add_row(*row, style=_WRONG)
    return table


def _planner(planner: Planned) -> RenderableType:
    title = f"hold: {planner.hold}" if planner.hold else f"led by {planner.lease}"
    table = _table(("PLANNED", "COUNT", "WANTED", "STATE", "REASON"), ("COUNT", "WANTED"))
    for role in planner.roles:
        wanted = "?" if role.wanted is None else str(role.wanted)
        table.add_row(role.component, str(role.count), wanted, role.state, role.reason)
    return Group(Text(f"planner  {title}"), table)


def _state(state: str) -> Text:
    return Text(state, style=_STATES.get(state, _WRONG))


def _count(value: int | None) -> str:
    return _NOTHING if value is None else f"{value:,}"


def as_bytes(amount: float) -> str:
    """In powers of 1000, as the transfer benchmarks."""
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"
