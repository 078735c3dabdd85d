"""Checks the kebab-case keys of a YAML section against the fields of a dataclass.

Every mistake is reported, with the accepted keys and the nearest one.
"""

import dataclasses
import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from dynamo_lite.serve.document import Document, KeyPath
from dynamo_lite.serve.removed import removed_option


def kebab(name: str) -> str:
    return name.replace("_", "-")


def field_keys(kind: type) -> list[str]:
    """The YAML keys of a dataclass."""
    return [kebab(field.name) for field in dataclasses.fields(kind)]


def unknown_key(key: str, accepted: Iterable[str], unlisted: Iterable[str] = ()) -> str:
    """The message for an unknown key: the nearest key and the accepted ones.

    unlisted: more keys that may be the nearest.
    """
    names = list(accepted)
    near = difflib.get_close_matches(kebab(key), [*names, *unlisted], n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"unknown key; {hint}accepted: {', '.join(names) or 'none'}"


def fill(
    document: Document,
    path: KeyPath,
    kind: type,
    given: Mapping[str, Any],
    defaults: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The options of `kind` in snake_case, with defaults.

    `given` has kebab-case keys. Mistakes are added to `document`; after a mistake the result
    is incomplete and must not be used.
    """
    names = _snake(document, path, kind, given)
    adapter: TypeAdapter[Any] = TypeAdapter(kind)
    try:
        # Strict JSON mode refuses "5" for 5 and 1 for true, but accepts 5 for 5.0.
        value = adapter.validate_json(
            json.dumps({**(defaults or {}), **names}, default=str), strict=True
        )
    except ValidationError as exc:
        for error in exc.errors(include_url=False):
            where = (*path, *(kebab(str(step)) for step in error["loc"]))
            got = json.dumps(error["input"], default=str)
            message = error["msg"]
            document.complain(where, f"{message[:1].lower()}{message[1:]}, got {got}")
        return {}
    return dataclasses.asdict(value)


def _snake(
    document: Document, path: KeyPath, kind: type, given: Mapping[str, Any]
) -> dict[str, Any]:
    """`given` with field names as keys, also in nested dataclasses."""
    accepted = {kebab(field.name): field.name for field in dataclasses.fields(kind)}
    hints = get_type_hints(kind)
    result: dict[str, Any] = {}
    for key, value in given.items():
        name = accepted.get(str(key))
        if name is None:
            gone = removed_option(*path, str(key))
            document.complain((*path, str(key)), gone or unknown_key(str(key), accepted))
        else:
            result[name] = _snake_value(document, (*path, str(key)), hints[name], value)
    return result


def _snake_value(document: Document, path: KeyPath, kind: Any, value: Any) -> Any:
    """A dataclass, a tuple of one kind of dataclass, or any other value."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and isinstance(value, dict):
        return _snake(document, path, kind, value)
    if get_origin(kind) is tuple and isinstance(value, list):
        element = get_args(kind)[0]
        return [
            _snake_value(document, (*path, str(number)), element, one)
            for number, one in enumerate(value)
        ]
    return value
