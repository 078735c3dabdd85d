"""`dynamo-lite top`: frames of a running graph, one, or on a terminal one after the other.

A frame is readable with 80 columns or more.
"""

import asyncio
import sys
import time
from collections.abc import Sequence

import msgspec
from rich.console import Console, Group, RenderableType
from rich.filesize import decimal
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dynamo_lite.cli.listing import Place, open_store
from dynamo_lite.runtime.overview.compose import ELSEWHERE
from dynamo_lite.runtime.overview.model import Overview
from dynamo_lite.runtime.overview.observer import Observer

#: Width of a plain frame; only a failed link's long reason is wider.
_PLAIN_WIDTH = 160
_NOTHING = "-"
_STATES = {"ready": "green", "starting": "yellow", "draining": "yellow"}
_WRONG = "bold red"


async def show(place: Place, interval_s: float, *, once: bool, as_json: bool) -> None:
    """Frames of which each replaces the last, with `interval_s` between them. One frame is plain
    text, not cut to the terminal's width, or JSON, and all that there is without a terminal.

    Raises StartupError or Unavailable when etcd does not respond.
    """
    once = once or not sys.stdout.isatty()
    async with (
        open_store(place) as store,
        Observer(store, place.namespace, certificates=place.certificates()) as observer,
    ):
        seen = await observer.look()
        if not once:
            with Live(screen=True, auto_refresh=False) as live:
                while True:
                    live.update(as_frame(seen), refresh=True)
                    await asyncio.sleep(interval_s)
                    seen = await observer.look()
        # Rates need two looks.
        await asyncio.sleep(interval_s)
        seen = await observer.look()
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(seen), indent=2).decode())
    else:
        console = Console(highlight=False, color_system=None, width=_PLAIN_WIDTH)
        console.print(as_frame(seen))


def as_frame(seen: Overview) -> RenderableType:
    clock = time.strftime("%H:%M:%S", time.localtime(seen.at))
    window = f"rates over {seen.rate_s:g} s, latencies over {seen.latency_s:g} s"
    title = ("dynamo-lite top", "bold"), f"  {seen.namespace}  {clock}  {window}"
    parts: list[RenderableType] = [Text.assemble(*title)]
    parts += [Text(f"! {sentence}", style=_WRONG) for sentence in seen.trouble]
    for section in (_workers(seen), _flow(seen), _decisions(seen), _failed_links(seen)):
        parts += ["", section]
    return Group(*parts)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str | Text]], nothing: str) -> Table:
    """Columns that end with `>` are numbers. nothing: the text in place of no rows."""
    if not rows:
        columns, rows = (nothing,), ()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in columns:
        justify = "right" if name.endswith(">") else "left"
        table.add_column(name.rstrip(">"), justify=justify, no_wrap=True, overflow="ellipsis")
    for row in rows:
        # A string would be read as markup.
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table


def _workers(seen: Overview) -> Table:
    columns = ("WORKER", "LEASE", "STATE", "MODEL", "RUNNING>", "WAITING>", "KV USE>")
    rows = [
        (
            f"{w.component}-{_count(w.instance)}",
            *(w.lease, _state(w.state), w.model or _NOTHING, _count(w.running), _count(w.waiting)),
            _NOTHING if w.kv_usage is None else f"{w.kv_usage:.0%}",
        )
        for w in seen.workers
    ]
    return _table(columns, rows, "no live workers")


def _flow(seen: Overview) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_row("requests", f"{_count(seen.in_flight)} in flight")
    if seen.engines:
        engines = [f"{each.role} {each.usable} of {each.known} usable" for each in seen.engines]
        table.add_row("engines", ", ".join(engines))
    jobs = f"{_count(seen.queue.jobs)} {'job' if seen.queue.jobs == 1 else 'jobs'}"
    tokens = "" if seen.queue.tokens is None else f", {seen.queue.tokens:,} tokens"
    table.add_row("queue", f"{jobs}{tokens}")
    moved = seen.transfers
    # In powers of 1000, as the transfer benchmarks.
    speed = f"{decimal(round(moved.bytes_per_s))}/s, {moved.jobs_per_s:.1f} jobs/s"
    table.add_row("transfers", speed, f"{decimal(moved.total_bytes)} in {moved.total_jobs:,} jobs")
    for name, latency in (("TTFT", seen.ttft), ("ITL", seen.itl)):
        p50_s, p95_s = latency.p50_s, latency.p95_s
        if p50_s is None or p95_s is None:
            table.add_row(name, _NOTHING)
        else:
            quantiles = f"p50 {as_time(p50_s)}, p95 {as_time(p95_s)}"
            table.add_row(name, quantiles, f"of {latency.count:,}")
    return table


def _decisions(seen: Overview) -> Table:
    rows = [
        [
            Text(text, style="bold cyan" if each.verdict in ELSEWHERE and each.per_s else "")
            for text in (each.verdict, each.reason, f"{each.per_s:.1f}", f"{each.total:,}")
        ]
        for each in seen.decisions
    ]
    return _table(("DECISIONS", "REASON", "PER S>", "TOTAL>"), rows, "no decisions yet")


def _failed_links(seen: Overview) -> Table:
    rows = [
        [
            Text(text, style=_WRONG)
            for text in (link.prefill, link.decode, as_next_try(link.next_try), link.detail)
        ]
        for link in seen.failed_links
    ]
    return _table(("PREFILL", "DECODE", "NEXT TRY", "FAILED LINK"), rows, "no failed links")


def _state(state: str) -> Text:
    return Text(state, style=_STATES.get(state, _WRONG))


def _count(value: int | None) -> str:
    return _NOTHING if value is None else f"{value:,}"


def as_time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


def as_next_try(at: float | None) -> str:
    """Of a failed link: time of day. at: see `LinkRecord`."""
    return "never" if at is None else time.strftime("%H:%M:%S", time.localtime(at))
