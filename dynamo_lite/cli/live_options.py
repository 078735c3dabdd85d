"""`dynamo-lite config`: live options, which change while processes run, and their records in etcd.

A key is `Component.option`, as in a section of the configuration file.
"""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any

import typer
from msgspec import UNSET

from dynamo_lite.cli.arguments import Json
from dynamo_lite.cli.listing import OnGraph, Place, on_graph, table
from dynamo_lite.planner.policy.limits import contradictions
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode_json
from dynamo_lite.protocol.errors import ConfigError, ProtocolError, StartupError, Unavailable
from dynamo_lite.protocol.live_options import (
    LIVE_OPTIONS,
    LiveOptionsRecord,
    Values,
    applied,
    checked,
    decode_live_options,
)
from dynamo_lite.protocol.options import PlannerOptions
from dynamo_lite.runtime.store import Store

#: Option (kebab-case) to its value; UNSET: back to the file.
Edit = Mapping[str, Any]
#: Key, value before and value after; UNSET: the value of the file.
Change = tuple[str, Any, Any]

_TRIES = 20

app = typer.Typer(
    no_args_is_help=True,
    help="""Look at live options and change them, without a restart.

    \b
    dynamo-lite config get
    dynamo-lite config set VllmWorker.max-local-prefill-length=256
    dynamo-lite config unset VllmWorker.max-local-prefill-length

    Keys are those of the configuration file; its values are used where nothing is set.
    Values that are set are stored in etcd, for all processes of the component, until they
    are unset, also across restarts; an embedded etcd starts empty. All processes follow within a
    second.
    """,
)


@app.command("get")
@on_graph
def get(
    graph: OnGraph,
    key: Annotated[str, typer.Argument(metavar="[KEY]", help="Show only this option.")] = "",
    as_json: Json = False,
) -> None:
    """Show the live options of the components that run, and what is set for others.

    SET: the value that was set; `-`: none, so the value of the file is used. FILE: as the
    live processes have read it; `?`: there are none.
    """
    found = graph.on_store(lambda store, place: rows(store, place, key))
    if as_json:
        print(json.dumps(found, indent=2))
        return
    cells = [
        (row["key"], shown(row.get("set", "-")), ", ".join(map(shown, row["file"])) or "?")
        for row in found
    ]
    print(table(("key", "set", "file"), cells))


@app.command("set")
@on_graph
def set_(
    graph: OnGraph,
    edits: Annotated[
        list[str], typer.Argument(metavar="KEY=VALUE...", help="The value is read as YAML.")
    ],
) -> None:
    """Set live options. Several options of one component change at once.

    A bad key or value is refused (exit code 2), and then nothing changes.

    \b
    dynamo-lite config set VllmWorker.max-local-prefill-length=256
    dynamo-lite config set VllmWorker.max-prefill-queue-size=4 VllmWorker.max-remote-prefills=1
    """
    _edit(graph, parse_edits(edits))


@app.command("unset")
@on_graph
def unset(
    graph: OnGraph,
    keys: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY...", help="Component.option, or a component for all of its options."
        ),
    ],
) -> None:
    """Use the values of the configuration file again.

    A component alone (`VllmWorker`) stands for all of its options; that also replaces
    an invalid record in etcd, such as one that was written by hand.
    """
    _edit(graph, parse_unsets(keys))


def _edit(graph: OnGraph, edits: Mapping[str, Edit]) -> None:
    for component, changes in graph.on_store(partial(change, edits)).items():
        for key, before, after in changes:
            print(f"{key}: {shown(before)} -> {shown(after)}")
        if not changes:
            print(f"{component}: no value differs")


async def change(edits: Mapping[str, Edit], store: Store, place: Place) -> dict[str, list[Change]]:
    """What `write` has changed, by component. Raises as `write`; ConfigError, and nothing changes,
    when the planner's options would contradict each other.

    The values of its file are those that a live planner reports, or the defaults.
    """
    file: dict[str, Any] = {}
    if "Planner" in edits:
        for facts in (await place.look(store, "Planner")).facts.values():
            file |= facts.get("options", {}).get("file", {})
    return {
        component: await write(store, place.namespace, component, edits[component], file)
        for component in sorted(edits, key=lambda name: name != "Planner")
    }


def parse_edits(words: Sequence[str]) -> dict[str, dict[str, Any]]:
    """`KEY=VALUE ...` by component. Raises ConfigError with every mistake."""
    from dynamo_lite.serve.document import parse_yaml

    edits: dict[str, dict[str, Any]] = {}
    mistakes: list[str] = []
    for word in words:
        key, equals, text = word.partition("=")
        try:
            if not equals:
                raise ConfigError([f"{word}: expected KEY=VALUE"])
            component, option = split_key(key)
            value = parse_yaml(text, key)
            try:
                edits.setdefault(component, {})[option] = checked(component, option, value)
            except ProtocolError as exc:
                mistakes.append(f"{component}.{exc}; got {value!r}")
        except ConfigError as exc:
            mistakes += exc.mistakes
    if mistakes:
        raise ConfigError(mistakes)
    return edits


def parse_unsets(words: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Keys, or components for all of their keys. Raises ConfigError."""
    edits: dict[str, dict[str, Any]] = {}
    for word in words:
        keys = (
            [f"{word}.{option}" for option in LIVE_OPTIONS[word]]
            if word in LIVE_OPTIONS
            else [word]
        )
        for component, option in map(split_key, keys):
            edits.setdefault(component, {})[option] = UNSET
    return edits


def split_key(key: str) -> tuple[str, str]:
    """Raises ConfigError when the key names no live option."""
    component, _, option = key.partition(".")
    if option not in LIVE_OPTIONS.get(component, ()):
        from dynamo_lite.serve.document import unknown_key

        keys = [f"{name}.{each}" for name, options in LIVE_OPTIONS.items() for each in options]
        unknown = unknown_key(key, keys).replace("unknown key", "no live option", 1)
        raise ConfigError([f"{key}: {unknown}"])
    return component, option


async def read(store: Store, namespace: str, component: str) -> Values:
    """What is set. Raises StartupError for an invalid record."""
    key = names.live_options_key(namespace, component)
    return _decoded(key, component, await store.get(key))


def _decoded(key: str, component: str, data: bytes | None) -> Values:
    try:
        return {} if data is None else decode_live_options(data, component)
    except ProtocolError as exc:
        repair = f"`dynamo-lite config unset {component}` replaces it"
        raise StartupError(f"the record in etcd is invalid: {key}: {exc}; {repair}") from exc


async def write(
    store: Store,
    namespace: str,
    component: str,
    edit: Edit,
    planner_file: Values = MappingProxyType({}),
) -> list[Change]:
    """Changes these options and no others, even with concurrent writers. planner_file: values of
    the planner's file, where they are not the defaults.

    An invalid record is only replaced by an edit that unsets all options. Raises StartupError for
    such a record; ConfigError when the planner's options would contradict each other; Unavailable.
    """
    key = names.live_options_key(namespace, component)
    replaces = all(edit.get(option) is UNSET for option in LIVE_OPTIONS[component])
    for _ in range(_TRIES):
        data = await store.get(key)
        try:
            before = _decoded(key, component, data)
        except StartupError:
            if not replaces:
                raise
            before = {}
        values = {o: value for o, value in {**before, **edit}.items() if value is not UNSET}
        if component == "Planner":
            planned = applied({**planner_file, **values}, PlannerOptions())
            if mistakes := contradictions(planned):
                raise ConfigError([f"Planner: {mistake}" for mistake in mistakes])
        if await store.swap(key, data, encode_json(LiveOptionsRecord(values=values))):
            both = ((o, before.get(o, UNSET), values.get(o, UNSET)) for o in edit)
            return [(f"{component}.{o}", was, now) for o, was, now in both if was != now]
    raise Unavailable(f"{key}: not changed: {_TRIES} conflicts with concurrent writers; try again")


async def rows(store: Store, place: Place, only: str = "") -> list[dict[str, Any]]:
    """A row for each option, or for the key `only`. Of a component without a live process: for each
    that is set.

    set: left out where nothing is. file: the values of the live processes, without repetition.
    """
    component, option = split_key(only) if only else ("", "")
    seen = await place.look(store, component)
    found: list[dict[str, Any]] = []
    for name in [component] if component else LIVE_OPTIONS:
        values = await read(store, place.namespace, name)
        facts = (seen.facts[one.lease_id] for one in seen.records.values() if one.component == name)
        files = [file for one in facts if (file := one.get("options", {}).get("file"))]
        for each in [option] if option else LIVE_OPTIONS[name] if files else values:
            row: dict[str, Any] = {"key": f"{name}.{each}"}
            if each in values:
                row["set"] = values[each]
            said = {shown(file[each]): file[each] for file in files if each in file}
            found.append(row | {"file": list(said.values())})
    return found


def shown(value: Any) -> str:
    if value is UNSET:
        return "(file)"
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
