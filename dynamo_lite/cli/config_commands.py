"""`dynamo-lite config`: options that change while processes run."""

import json
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

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
from dynamo_lite.protocol.errors import ConfigError, ProtocolError, StartupError
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

Keys = Annotated[
    list[str],
    typer.Argument(
        metavar="KEY...", help="Component.option, or a component for all of its options."
    ),
]
T = TypeVar("T")


@app.command("get")
def get(
    key: Annotated[str, typer.Argument(metavar="[KEY]", help="Show only this option.")] = "",
    etcd_url: EtcdUrl = None,
    secret_file: SecretFile = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    namespace: Namespace = None,
    as_json: Json = False,
) -> None:
    """Show the live options, the values of the file, and which processes follow.

    LIVE: the value that was set; `-`: none, so the value of the file is used. FILE: as the
    live processes have read it; `?`: there are none.
    """
    from dynamo_lite.cli import listing, live_options, live_options_view, record_seals

    only = live_options.split_key(key) if key else None

    async def look(store: Any, place: Any) -> list[tuple[str, Any, list[dict[str, Any]]]]:
        seals = record_seals.find_seals(state_dir, place, secret_file)
        members = await listing.members(place)
        if warning := record_seals.unchecked(members, seals):
            print(f"warning: {warning}", file=sys.stderr)
        return [
            (
                component,
                await live_options.read(store, place.namespace, component, seals),
                await live_options.followers(members, component),
            )
            for component in ([only[0]] if only else live_options.LIVE_OPTIONS)
        ]

    found = _on_store(state_dir, etcd_url, namespace, look)
    if as_json:
        print(json.dumps([live_options_view.as_json(*each) for each in found], indent=2))
        return
    print("\n\n".join(live_options_view.as_text(*each, only[1] if only else "") for each in found))


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
    keys: Keys,
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


@app.command("watch")
def watch(
    etcd_url: EtcdUrl = None,
    secret_file: SecretFile = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    namespace: Namespace = None,
) -> None:
    """Print changes of live options as they happen, until Ctrl-C."""
    from dynamo_lite.cli import live_options, live_options_view, record_seals

    async def follow(store: Any, place: Any) -> None:
        seals = record_seals.find_seals(state_dir, place, secret_file)
        print(f"watching {place.namespace}; Ctrl-C ends", file=sys.stderr)
        async for change in live_options.changes(store, place.namespace, seals):
            lines = [change] if isinstance(change, str) else live_options_view.change_lines(change)
            for line in lines:
                print(f"{time.strftime('%H:%M:%S')}  {line}", flush=True)

    try:
        _on_store(state_dir, etcd_url, namespace, follow)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


@app.command("seal")
def seal(
    etcd_url: EtcdUrl = None,
    secret_file: SecretFile = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    namespace: Namespace = None,
) -> None:
    """Seal what is stored again, with the first key of the secret. No value changes.

    For the replacement of a secret: before the last round, which removes the old key. Live options
    that are not authentic are refused, and such records of the planner are left as they are.
    """
    from dynamo_lite.cli import live_options, record_seals

    async def write(store: Any, place: Any) -> list[str]:
        seals = record_seals.find_seals(state_dir, place, secret_file)
        if not seals.checked:
            raise StartupError("no secret to seal with; name it with --secret-file FILE")
        found: list[str] = []
        for component in live_options.LIVE_OPTIONS:
            if await live_options.read(store, place.namespace, component, seals) is not None:
                await live_options.write(store, place.namespace, component, {}, seals=seals)
                found.append(component)
        return found + await record_seals.seal_planner_records(store, place.namespace, seals)

    found = _on_store(state_dir, etcd_url, namespace, write)
    print(f"sealed: {', '.join(found)}" if found else "nothing is set")


def _edit(
    edits: dict[str, dict[str, Any]],
    state_dir: Path,
    etcd_url: str | None,
    namespace: str | None,
    secret_file: Path | None,
) -> None:
    from dynamo_lite.cli import listing, live_options, live_options_view, planner, record_seals
    from dynamo_lite.protocol import names

    async def write(store: Any, place: Any) -> list[Any]:
        seals = record_seals.find_seals(state_dir, place, secret_file)
        members = await listing.members(place)
        keys = [names.live_options_key(place.namespace, component) for component in edits]
        await record_seals.check_may_write(store, keys, members, seals)
        if (edit := edits.get("Planner")) is not None:
            await planner.check_options(store, place, edit, seals)
        changes: list[Any] = []
        for component, edit in edits.items():
            processes = await live_options.followers(members, component) if seals.checked else ()
            newest = live_options.newest_version(processes)
            changes.append(
                await live_options.write(
                    store, place.namespace, component, edit, seals=seals, newest=newest
                )
            )
        return changes

    for change in _on_store(state_dir, etcd_url, namespace, write):
        print("\n".join(live_options_view.change_lines(change)))


def _on_store(
    state_dir: Path,
    etcd_url: str | None,
    namespace: str | None,
    work: Callable[[Any, Any], Awaitable[T]],
) -> T:
    """As `on_store`, but an invalid record raises StartupError, which says how to replace it."""
    try:
        return on_store(state_dir, etcd_url, namespace, work)
    except ProtocolError as exc:
        repair = "`dynamo-lite config unset COMPONENT` replaces it"
        raise StartupError(f"the record in etcd is invalid: {exc}; {repair}") from exc
