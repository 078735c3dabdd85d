"""`dynamo-lite planner`: what the planner does, and an operator's orders to it."""

import json
from typing import Annotated, Any

import typer

from dynamo_lite.cli.arguments import (
    DEFAULT_STATE_DIR,
    EXIT_FAILED,
    EtcdUrl,
    Json,
    Namespace,
    NatsUrl,
    SecretFile,
    StateDir,
    Targets,
)
from dynamo_lite.cli.listing import find_seals, on_store

app = typer.Typer(
    no_args_is_help=True,
    help="""Look at the planner, pause it, and set numbers of workers.

    \b
    dynamo-lite planner status
    dynamo-lite planner explain --last 5
    dynamo-lite planner set VllmWorker=3
    dynamo-lite planner unset VllmWorker
    dynamo-lite planner pause --reason "an upgrade"
    dynamo-lite planner resume

    The planner is the service Planner (graphs.disagg_planner). Its options change with
    `dynamo-lite config set Planner.OPTION=VALUE`.

    Where the graph has a secret, its records are sealed with it, and `set`, `unset` and `pause`
    need it: it is that of the graph that runs on --state-dir, or --secret-file.
    """,
)


@app.command("status")
def status(
    etcd_url: EtcdUrl = None,
    secret_file: SecretFile = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    namespace: Namespace = None,
    as_json: Json = False,
) -> None:
    """Show which planner leads, what it wants and why, and what is under way.

    STATE is hold (it may not act, or does not know the load), observe (the number fits),
    pending (another number has to be wanted for a while), acting (an order is not confirmed)
    or settling (workers are starting or draining). Exit code 1: no planner runs.
    """
    from dynamo_lite.cli import planner, planner_view

    async def look(store: Any, place: Any) -> Any:
        return await planner.look(store, place, find_seals(state_dir, place, secret_file))

    seen = on_store(state_dir, etcd_url, namespace, look)
    print(
        json.dumps(planner_view.as_json(seen), indent=2) if as_json else planner_view.as_text(seen)
    )
    if not seen.planners:
        raise typer.Exit(EXIT_FAILED)


@app.command("explain")
def explain(
    last: Annotated[int, typer.Option(min=1, max=500, help="How many decisions to show.")] = 10,
    etcd_url: EtcdUrl = None,
    nats_url: NatsUrl = None,
    secret_file: SecretFile = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    namespace: Namespace = None,
    as_json: Json = False,
) -> None:
    """Show the last decisions of the planner that leads, with their reasons.

    A decision is kept when the planner acts and when what it wants changes, 500 at most.
    Exit code 1: no planner answers.
    """
    from dynamo_lite.cli import planner, planner_view
    from dynamo_lite.cli.listing import find_broker

    broker = find_broker(state_dir, nats_url, secret_file)

    async def ask(store: Any, place: Any) -> Any:
        return await planner.explain(store, place, broker, last)

    report = on_store(state_dir, etcd_url, namespace, ask)
    print(
        json.dumps(planner_view.report_as_json(report), indent=2)
        if as_json
        else planner_view.report_as_text(report)
    )


@app.command("pause")
def pause(
    reason: Annotated[str, typer.Option(help="Why; `planner status` shows it.")] = "",
    etcd_url: EtcdUrl = None,
    secret_file: SecretFile = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    namespace: Namespace = None,
) -> None:
    """Stop decisions until `resume`. What is under way is completed, and `set` still works."""
    from dynamo_lite.cli import planner

    async def write(store: Any, place: Any) -> None:
        await planner.pause(store, place, reason, find_seals(state_dir, place, secret_file))

    on_store(state_dir, etcd_url, namespace, write)
    print("paused; `dynamo-lite planner resume` goes on")


@app.command("resume")
def resume(
    etcd_url: EtcdUrl = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    namespace: Namespace = None,
) -> None:
    """Let the planner decide again."""
    from dynamo_lite.cli import planner

    async def write(store: Any, place: Any) -> bool:
        return await planner.resume(store, place)

    was = on_store(state_dir, etcd_url, namespace, write)
    print("resumed" if was else "it was not paused")


@app.command("set")
def set_(
    targets: Targets,
    etcd_url: EtcdUrl = None,
    secret_file: SecretFile = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    namespace: Namespace = None,
) -> None:
    """Set numbers of workers. The planner reaches them whatever the load is.

    From then on it decides again, from these numbers; `planner pause` before keeps them. Numbers
    outside the minimum and maximum of a role or beyond the budget are refused (exit code 2), and
    then nothing changes. The command does not wait: `planner status` shows the progress.

    \b
    dynamo-lite planner set VllmWorker=3
    dynamo-lite planner set VllmWorker=2 PrefillWorker=4
    """
    from dynamo_lite.cli import planner
    from dynamo_lite.cli.scale import parse_targets

    wanted = parse_targets(targets)

    async def write(store: Any, place: Any) -> Any:
        seals = find_seals(state_dir, place, secret_file)
        return await planner.set_counts(store, place, wanted, seals)

    record = on_store(state_dir, etcd_url, namespace, write)
    numbers = ", ".join(f"{component}={number}" for component, number in record.manual.items())
    print(f"set: {numbers}  (version {record.version} by {record.by})")


@app.command("unset")
def unset(
    components: Annotated[
        list[str] | None, typer.Argument(metavar="[COMPONENT...]", help="For example VllmWorker.")
    ] = None,
    etcd_url: EtcdUrl = None,
    secret_file: SecretFile = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    namespace: Namespace = None,
) -> None:
    """Forget numbers that were set and are not reached: the planner decides again.

    Without COMPONENT all of them. Workers that were started or removed for them stay so until the
    planner decides otherwise. Exit code 2: COMPONENT has no such number.

    \b
    dynamo-lite planner unset VllmWorker
    """
    from dynamo_lite.cli import planner

    async def write(store: Any, place: Any) -> Any:
        seals = find_seals(state_dir, place, secret_file)
        return await planner.unset_counts(store, place, components or [], seals)

    record, gone = on_store(state_dir, etcd_url, namespace, write)
    if not gone:
        print("no number is set")
        return
    numbers = ", ".join(f"{component}={number}" for component, number in gone.items())
    print(f"unset: {numbers}  (version {record.version} by {record.by})")
