"""`dynamo-lite config`: options that change while processes run."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from dynamo_lite.cli.arguments import (
    DEFAULT_STATE_DIR,
    EtcdUrl,
    Json,
    Namespace,
    SecretFile,
    StateDir,
)
from dynamo_lite.cli.on_store import on_store
from dynamo_lite.protocol.errors import ConfigError
from dynamo_lite.serve.removed import removed_command

app = typer.Typer(
    no_args_is_help=True,
    help="""Look at live options and change them, without a restart.

    \b
    dynamo-lite config get
    dynamo-lite config set VllmWorker.max-local-prefill-length=256
    dynamo-lite config unset VllmWorker.max-local-prefill-length

    Where the graph has a secret, what is stored is sealed with it, and the commands need it: it
    is that of the graph that runs on --state-dir, or --secret-file.

    Keys are those of the configuration file; its values are used where nothing is set.
    Values that are set are stored in etcd, for all processes of the component, until they
    are unset, also across restarts. All processes follow within a second.
    """,
)


@app.command("get")
def get(
    key: Annotated[str, typer.Argument(metavar="[KEY]", help="Show only this option.")] = "",
    etcd_url: EtcdUrl = None,
    secret_file: SecretFile = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    namespace: Namespace = None,
    as_json: Json = False,
) -> None:
    """Show the live options of the components that run, and what is set for others.

    SET: the value that was set; `-`: none, so the value of the file is used. FILE: as the
    live processes have read it; `?`: there are none.
    """
    from dynamo_lite.cli import listing, live_options, record_seals

    component, only = live_options.split_key(key) if key else ("", "")

    async def look(store: Any, place: Any) -> list[dict[str, Any]]:
        seals = record_seals.find_seals(state_dir, place, secret_file)
        members = await listing.members(place)
        if warning := record_seals.unchecked(members, seals):
            print(f"warning: {warning}", file=sys.stderr)
        return [
            row
            for name in ([component] if component else live_options.LIVE_OPTIONS)
            for row in await live_options.rows(store, place.namespace, name, members, seals, only)
        ]

    found = on_store(state_dir, etcd_url, namespace, look)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    shown = live_options.shown
    cells = [
        (
            row["key"],
            shown(row["set"]) if "set" in row else "-",
            ", ".join(map(shown, row["file"])) or "?",
        )
        for row in found
    ]
    print(listing.table(("key", "set", "file"), cells))


@app.command("set")
def set_(
    edits: Annotated[
        list[str], typer.Argument(metavar="KEY=VALUE...", help="The value is read as YAML.")
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", hidden=True)] = False,
    etcd_url: EtcdUrl = None,
    secret_file: SecretFile = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    namespace: Namespace = None,
) -> None:
    """Set live options. Several options of one component change at once.

    A bad key or value is refused (exit code 2), and then nothing changes.

    \b
    dynamo-lite config set VllmWorker.max-local-prefill-length=256
    dynamo-lite config set VllmWorker.max-prefill-queue-size=4 VllmWorker.max-remote-prefills=1
    """
    from dynamo_lite.cli.live_options import parse_edits

    if dry_run:
        raise ConfigError([f"--dry-run: {removed_command('config set --dry-run')}"])
    _edit(parse_edits(edits), state_dir, etcd_url, namespace, secret_file)


@app.command("unset")
def unset(
    keys: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY...", help="Component.option, or a component for all of its options."
        ),
    ],
    etcd_url: EtcdUrl = None,
    secret_file: SecretFile = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    namespace: Namespace = None,
) -> None:
    """Use the values of the configuration file again.

    A component alone (`VllmWorker`) stands for all of its options; that also replaces
    an invalid record in etcd, such as one that was written by hand or is not authentic.
    """
    from dynamo_lite.cli.live_options import parse_unsets

    _edit(parse_unsets(keys), state_dir, etcd_url, namespace, secret_file)


def _edit(
    edits: dict[str, dict[str, Any]],
    state_dir: Path,
    etcd_url: str | None,
    namespace: str | None,
    secret_file: Path | None,
) -> None:
    from dynamo_lite.cli import listing, live_options, planner, record_seals
    from dynamo_lite.protocol import names

    async def write(store: Any, place: Any) -> dict[str, list[Any]]:
        seals = record_seals.find_seals(state_dir, place, secret_file)
        keys = [names.live_options_key(place.namespace, component) for component in edits]
        await record_seals.check_may_write(store, keys, await listing.members(place), seals)
        if (edit := edits.get("Planner")) is not None:
            await planner.check_options(store, place, edit, seals)
        return {
            component: await live_options.write(store, place.namespace, component, edit, seals)
            for component, edit in edits.items()
        }

    shown = live_options.shown
    for component, changes in on_store(state_dir, etcd_url, namespace, write).items():
        for key, before, after in changes:
            print(f"{key}: {shown(before)} -> {shown(after)}")
        if not changes:
            print(f"{component}: no value differs")
