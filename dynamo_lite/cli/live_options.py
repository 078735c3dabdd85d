"""Live options by their keys, their records in etcd and the processes that follow them.

A key is `Component.option`, as in a section of the configuration file.
"""

import os
import pwd
import socket
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import yaml
from msgspec import UNSET, UnsetType, inspect

from dynamo_lite.cli.listing import facts_of
from dynamo_lite.protocol import names
from dynamo_lite.protocol.errors import ConfigError, ProtocolError, Unavailable
from dynamo_lite.protocol.live_options import (
    LIVE_OPTIONS,
    LiveOptionsRecord,
    decode_live_options,
    encode_live_options,
)
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.runtime.sealed_records import UNSEALED, RecordSeals
from dynamo_lite.runtime.store import Delete, Put, Snapshot, Store
from dynamo_lite.serve.fields import unknown_key
from dynamo_lite.serve.removed import removed_option

Record = LiveOptionsRecord[Any]
#: Option (kebab-case) to its value; UNSET: back to the file.
Edit = Mapping[str, Any]

_TRIES = 20


@dataclass(frozen=True)
class RecordChange:
    """One component's record before and after."""

    component: str
    old: Record | None
    new: Record | None


def options_of(component: str) -> dict[str, str]:
    """Option to its field's name."""
    return {f.encode_name: f.name for f in msgspec.structs.fields(LIVE_OPTIONS[component])}


def keys() -> list[str]:
    return [f"{component}.{name}" for component in LIVE_OPTIONS for name in options_of(component)]


def accepted(component: str, option: str) -> str:
    """The values that an option accepts, in words."""
    info = inspect.type_info(LIVE_OPTIONS[component])
    assert isinstance(info, inspect.StructType)
    field = next(f for f in info.fields if f.encode_name == option)
    types = field.type.types if isinstance(field.type, inspect.UnionType) else (field.type,)
    return " or ".join(text for kind in types if (text := _words(kind)))


def _words(kind: inspect.Type) -> str:
    if isinstance(kind, inspect.NoneType):
        return "null"
    if isinstance(kind, inspect.BoolType):
        return "true or false"
    if isinstance(kind, inspect.LiteralType):
        return " or ".join(map(str, kind.values))
    if not isinstance(kind, inspect.IntType | inspect.FloatType):
        return ""
    noun = "a whole number" if isinstance(kind, inspect.IntType) else "a number"
    low = f"≥ {kind.ge}" if kind.ge is not None else f"> {kind.gt}"
    return f"{noun} {low} and ≤ {kind.le:,.0f}"


def parse_edits(words: Sequence[str]) -> dict[str, dict[str, Any]]:
    """`KEY=VALUE ...`, or `KEY VALUE`, by component. Raises ConfigError with every mistake."""
    if len(words) == 2 and not any("=" in word for word in words):
        words = ["=".join(words)]
    edits: dict[str, dict[str, Any]] = {}
    mistakes: list[str] = []
    for word in words:
        key, equals, text = word.partition("=")
        try:
            if not equals:
                raise ConfigError([f"{word}: expected KEY=VALUE"])
            component, option = split_key(key)
            value = checked(component, option, _parsed(key, text))
            edits.setdefault(component, {})[option] = value
        except ConfigError as exc:
            mistakes += exc.mistakes
    if mistakes:
        raise ConfigError(mistakes)
    return edits


def parse_unsets(words: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Keys, or components for all of their keys. Raises ConfigError."""
    edits: dict[str, dict[str, Any]] = {}
    for word in words:
        component, option = (word, "") if word in LIVE_OPTIONS else split_key(word)
        wanted = [option] if option else list(options_of(component))
        edits.setdefault(component, {}).update(dict.fromkeys(wanted, UNSET))
    return edits


def split_key(key: str) -> tuple[str, str]:
    """Raises ConfigError when the key names no live option."""
    component, _, option = key.partition(".")
    if component not in LIVE_OPTIONS or option not in options_of(component):
        message = removed_option(component, option) or unknown_key(key, keys())
        raise ConfigError([f"{key}: {message}"])
    return component, option


def checked(component: str, option: str, value: Any) -> Any:
    """The value as it will be stored. Raises ConfigError with the accepted range."""
    try:
        values = msgspec.convert({option: value}, LIVE_OPTIONS[component])
        encode_live_options(LiveOptionsRecord(values=values, version=1))
    except (msgspec.ValidationError, ProtocolError) as exc:
        said = f"{component}.{option}: expected {accepted(component, option)}, got {value!r}"
        raise ConfigError([said]) from exc
    return getattr(values, options_of(component)[option])


def _parsed(key: str, text: str) -> Any:
    try:
        return yaml.load(text, Loader=yaml.CSafeLoader)
    except (yaml.YAMLError, ValueError) as exc:
        raise ConfigError([f"{key}: not valid YAML: {' '.join(str(exc).split())}"]) from exc


async def read(
    store: Store, namespace: str, component: str, seals: RecordSeals = UNSEALED
) -> Record | None:
    """None when nothing was changed. Raises ProtocolError for a record that is invalid or not
    authentic."""
    key = names.live_options_key(namespace, component)
    return _decoded(key, component, await store.get(key), seals)


def _decoded(key: str, component: str, data: bytes | None, seals: RecordSeals) -> Record | None:
    try:
        return (
            None
            if data is None
            else decode_live_options(seals.opened(key, data), LIVE_OPTIONS[component])
        )
    except ProtocolError as exc:
        raise ProtocolError(f"{key}: {exc}") from exc


async def write(
    store: Store,
    namespace: str,
    component: str,
    edit: Edit,
    *,
    seals: RecordSeals = UNSEALED,
    newest: int = 0,
) -> RecordChange:
    """Changes these options and no others, even with concurrent writers.

    newest: a version that the new one is to exceed; processes with a secret take no lower one.

    A record that is invalid or not authentic is only replaced by an edit that unsets all options.
    Raises ProtocolError for such a record, and Unavailable.
    """
    key, fields = names.live_options_key(namespace, component), options_of(component)
    for _ in range(_TRIES):
        data = await store.get(key)
        try:
            old = _decoded(key, component, data, seals)
        except ProtocolError:
            if any(edit.get(option, 0) is not UNSET for option in fields):
                raise
            old = None
        values = msgspec.structs.replace(
            old.values if old else LIVE_OPTIONS[component](),
            **{fields[option]: value for option, value in edit.items()},
        )
        version = max(old.version if old else 0, newest) + 1
        new = LiveOptionsRecord(values=values, version=version, by=whoami(), at=time.time())
        if await store.swap(key, data, seals.sealed(key, encode_live_options(new))):
            return RecordChange(component, old, new)
    raise Unavailable(f"{key}: not changed: {_TRIES} conflicts with concurrent writers; try again")


async def changes(
    store: Store, namespace: str, seals: RecordSeals = UNSEALED
) -> AsyncIterator[RecordChange | str]:
    """The changes of the records from now on; a text for an invalid record."""
    prefix = names.live_options_key(namespace, "")
    known: dict[str, Record | None] = {}
    async with store.watch(prefix) as events:
        first = True
        async for event in events:
            match event:
                case Snapshot(entries):
                    found = {
                        component: entries.get(f"{prefix}{component}") for component in LIVE_OPTIONS
                    }
                case Put(key, value):
                    found = {key.removeprefix(prefix): value}
                case Delete(key):
                    found = {key.removeprefix(prefix): None}
            for component, data in found.items():
                if component not in LIVE_OPTIONS:
                    continue
                try:
                    new = _decoded(f"{prefix}{component}", component, data, seals)
                except ProtocolError as exc:
                    yield f"invalid record, refused by all processes: {exc}"
                    continue
                old, known[component] = known.get(component), new
                if not first and new != old:
                    yield RecordChange(component, old, new)
            first = False


async def followers(records: Iterable[EndpointRecord], component: str) -> list[dict[str, Any]]:
    """The live processes of a component, with the options that they report."""
    members = {record.lease_id: record for record in records if record.component == component}
    facts = await facts_of(members.values())
    return [
        {"lease": f"{lease_id:x}", "pid": record.pid, **_options(facts[record.status_url])}
        for lease_id, record in members.items()
    ]


def newest_version(processes: Iterable[Mapping[str, Any]]) -> int:
    """The highest version that these followers have seen."""
    seen = (process.get("newest") for process in processes)
    return max((version for version in seen if isinstance(version, int)), default=0)


def _options(facts: dict[str, Any]) -> dict[str, Any]:
    options = facts.get("options")
    if not isinstance(options, dict) or "version" not in options:
        return {"version": None}
    return options


def differences(change: RecordChange) -> list[tuple[str, Any, Any]]:
    """(key, value before, value after) of each difference; UNSET: as in the file."""
    rows: list[tuple[str, Any, Any]] = []
    for option, field in options_of(change.component).items():
        before, after = (
            UNSET if record is None else getattr(record.values, field)
            for record in (change.old, change.new)
        )
        if before != after or isinstance(before, UnsetType) != isinstance(after, UnsetType):
            rows.append((f"{change.component}.{option}", before, after))
    return rows


def whoami() -> str:
    """By the process's own user id, since the environment is not reliable."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"[:256]
