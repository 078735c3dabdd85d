"""`dynamo-lite planner`: what the planner does, and an operator's orders to it."""

import json
import os
import pwd
import socket
import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec
import typer
from msgspec.structs import replace

from dynamo_lite.cli.arguments import EXIT_FAILED, Json, Targets
from dynamo_lite.cli.listing import OnGraph, Place, on_graph, table
from dynamo_lite.cli.scale import parse_targets
from dynamo_lite.planner.policy.limits import refusals
from dynamo_lite.planner.record import edit, read
from dynamo_lite.protocol.errors import ConfigError, StartupError
from dynamo_lite.protocol.options import PlannerOptions
from dynamo_lite.protocol.planner import WantedRecord
from dynamo_lite.runtime.store import Store

_COLUMNS = ("component", "count", "wanted", "reason")

app = typer.Typer(
    no_args_is_help=True,
    help="""Look at the planner, pause it, and set numbers of workers.

    \b
    dynamo-lite planner status
    dynamo-lite planner set VllmWorker=3
    dynamo-lite planner pause --reason "an upgrade"
    dynamo-lite planner resume

    The planner is the service Planner (graphs.disagg_planner). Its options change with
    `dynamo-lite config set Planner.OPTION=VALUE`.
    """,
)


@app.command("status")
@on_graph
def _status(
    graph: OnGraph,
    as_json: Json = False,
) -> None:
    """Show which planner leads, what it wants and why, and what is under way.

    Exit code 1: no planner runs.
    """
    seen = graph.on_store(look)
    print(json.dumps(seen, indent=2) if as_json else as_text(seen))
    if not seen["planners"]:
        raise typer.Exit(EXIT_FAILED)


@app.command("pause")
@on_graph
def _pause(
    graph: OnGraph,
    reason: Annotated[str, typer.Option(help="Why; `planner status` shows it.")] = "",
) -> None:
    """Stop decisions until `resume`. What is under way is completed, and `set` still works."""
    graph.on_store(lambda store, place: _edit(store, place, lambda _: {"paused": reason[:1024]}))
    print("paused; `dynamo-lite planner resume` goes on")


@app.command("resume")
@on_graph
def _resume(graph: OnGraph) -> None:
    """Let the planner decide again."""
    graph.on_store(lambda store, place: _edit(store, place, lambda _: {"paused": None}))
    print("resumed")


@app.command("set")
@on_graph
def _set(
    graph: OnGraph,
    targets: Targets,
) -> None:
    """Set numbers of workers. The planner reaches them whatever the load is.

    From then on it decides again, from these numbers; `planner pause` before keeps them. Numbers
    outside the minimum and maximum of a role are refused (exit code 2), and then nothing changes.
    The command does not wait: `planner status` shows the progress, and what waits for the budget.

    \b
    dynamo-lite planner set VllmWorker=3
    dynamo-lite planner set VllmWorker=2 PrefillWorker=4
    """
    wanted = parse_targets(targets)
    record = graph.on_store(lambda store, place: set_counts(store, place, wanted))
    print(f"set: {_numbers(record.manual)}  (by {record.by})")


def _numbers(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{component}={number}" for component, number in counts.items())


async def look(store: Store, place: Place) -> dict[str, Any]:
    """What `status --json` prints. A planner that does not respond has no facts but its lease."""
    records = await read(store, place.namespace)
    return {
        "planners": [
            {"lease": f"{lease:x}", **facts.get("planner", {})}
            for lease, facts in (await place.look(store, "Planner")).facts.items()
        ],
        "leader": f"{records.leader:x}" if records.leader else None,
        "wanted": msgspec.to_builtins(records.wanted or WantedRecord()),
        "malformed": records.malformed,
    }


def _led_by(seen: Mapping[str, Any]) -> Mapping[str, Any]:
    """Facts of the planner that leads; empty if it does not respond."""
    found = (one for one in seen["planners"] if one["lease"] == seen["leader"] and "roles" in one)
    return next(found, {})


async def set_counts(store: Store, place: Place, wanted: Mapping[str, int]) -> WantedRecord:
    """Raises ConfigError for numbers that the planner would not reach, StartupError without a
    planner that leads, Unavailable after many conflicts with other writers."""
    seen = await look(store, place)
    if not seen["planners"]:
        raise StartupError("no planner runs; graphs.disagg_planner has one")
    if all(facts.get("dry_run") for facts in seen["planners"]):
        raise StartupError("the planner runs with dry-run: it would not change anything")
    if not (facts := _led_by(seen)):
        raise StartupError("no planner leads, or it does not respond; `planner status` shows more")
    names = [one["component"] for one in facts["roles"]]
    mistakes = [
        f"{component}: the planner has no such role; accepted: {', '.join(names) or 'none'}"
        for component in wanted
        if component not in names
    ]
    mistakes = mistakes or refusals(wanted, msgspec.convert(facts["limits"], PlannerOptions))
    if mistakes:
        raise ConfigError(mistakes)
    return await _edit(store, place, lambda record: {"manual": {**record.manual, **wanted}})


async def _edit(
    store: Store, place: Place, change: Callable[[WantedRecord], dict[str, Any]]
) -> WantedRecord:
    """By this user. change: the fields that are replaced. Raises as `edit`."""
    return await edit(
        store, place.namespace, lambda record: replace(record, **change(record), by=_whoami())
    )


def _whoami() -> str:
    """By the process's own user id, since the environment is not reliable."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"[:256]


def as_text(seen: Mapping[str, Any]) -> str:
    """seen: as `look` returns it."""
    lines = [f"! ignored: {problem}" for problem in seen["malformed"]]
    if not (planners := seen["planners"]):
        return "\n".join([*lines, "no planner runs"])
    led_by, wanted = _led_by(seen), seen["wanted"]
    facts = led_by or planners[0]
    if not seen["leader"]:
        lines.append("no planner leads")
    else:
        more = f", {len(planners) - 1} more ready to take over" if len(planners) > 1 else ""
        silent = "" if led_by else ", but it does not respond"
        lines.append(f"planner {seen['leader']} leads{silent}{more}")
    if facts.get("hold"):
        lines.append(f"hold: {facts['hold']}")
    if wanted["paused"] is not None:
        lines.append(f"paused by {wanted['by']}: {wanted['paused']}".removesuffix(": "))
    if manual := wanted["manual"]:
        lines.append(f"set by an operator, not reached yet: {_numbers(manual)}")
        lines.append("  `dynamo-lite planner set` with the present number gives one up")
    if roles := facts.get("roles"):
        rows = [{**one, "wanted": "?"} if one["wanted"] is None else one for one in roles]
        lines += ["", table(_COLUMNS, [[row[name] for name in _COLUMNS] for row in rows])]
    lines += [f"would do: {action}" for action in facts.get("held", [])]
    for component, last in wanted["roles"].items():
        what = f"the last change: {component} {'up' if last['up'] else 'down'} to {last['count']}"
        age_s = max(time.time() - last["at"], 0.0)
        lines.append(f"{what}, {age_s:.0f} s ago by {last['by']}: {last['reason']}")
    return "\n".join(lines)
