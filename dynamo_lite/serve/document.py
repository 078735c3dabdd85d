"""The user's YAML and `--Service.key=value` overrides as one tree with origins.

Keeps the origin of every value, so that a mistake can name its file and line or its flag. `fill`
checks the kebab-case keys of a section against the fields of a dataclass, and names the accepted
keys and the nearest one. `config.py` interprets the values.
"""

import dataclasses
import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

import msgspec
import yaml

from dynamo_lite.protocol.errors import ConfigError
from dynamo_lite.runtime.address import redact

KeyPath = tuple[str, ...]
T = TypeVar("T")


@dataclass(kw_only=True)
class Document:
    """What the user wrote, and the mistakes found in it so far."""

    #: The file's path, for messages about keys that were not written.
    source: str
    #: Section name to its content.
    tree: dict[str, Any] = field(default_factory=dict)
    #: Key path to where it was written: "agg.yaml:12" or a flag.
    origins: dict[KeyPath, str] = field(default_factory=dict)
    mistakes: list[str] = field(default_factory=list)

    def where(self, path: KeyPath) -> str:
        """Origin of `path`, or else of its nearest ancestor that was written."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
        return self.source

    def section(self, *path: str) -> dict[str, Any]:
        """Keys and values at `path`; none where nothing was written."""
        value: Any = self.tree
        for step in path:
            value = value.get(step) if isinstance(value, dict) else None
        if value is None or isinstance(value, dict):
            return value or {}
        self.complain(path, f"expected keys and values, got {value!r}")
        return {}

    def complain(self, path: KeyPath, message: str) -> None:
        """Adds a mistake with the origin and name of `path`."""
        where, name = self.where(path), ".".join(path)
        # The flag of an override already names the path.
        self.mistakes.append(
            f"{where}: {message}" if where == f"--{name}" else f"{where}: {name}: {message}"
        )

    def raise_mistakes(self) -> None:
        if self.mistakes:
            raise ConfigError(self.mistakes)


def read_document(file: Path | None, overrides: list[str]) -> Document:
    """Reads `file` and applies `overrides` to it.

    Raises ConfigError when the file cannot be read or is not YAML; other mistakes are
    collected in the document.
    """
    document = Document(source=str(file) if file else "(no file)")
    if file is not None:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as exc:
            raise ConfigError([f"{file}: cannot be read: {exc}"]) from exc
        tree = parse_yaml(text, str(file))
        _note_origins(document, yaml.compose(text, yaml.CSafeLoader), ())
        if not isinstance(tree, dict | None):
            raise ConfigError([f"{file}: expected sections such as `Frontend:`, got {tree!r}"])
        document.tree = tree or {}
    for text in overrides:
        _apply_override(document, text)
    return document


def parse_yaml(text: str, where: str) -> Any:
    """The value; None if there is none. where: to name a mistake. Raises ConfigError."""
    try:
        value = yaml.load(text, yaml.CSafeLoader)
        # Options reach vLLM and the processes as JSON, which has no keys that are dates.
        json.dumps(value, default=str)
        return value
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as exc:
        raise ConfigError([f"{where}: not valid YAML: {' '.join(str(exc).split())}"]) from exc


def _note_origins(document: Document, node: yaml.Node | None, path: KeyPath) -> None:
    """Records the line of every key and reports duplicate keys."""
    if not isinstance(node, yaml.MappingNode):
        return
    for key_node, value_node in node.value:
        if (key := str(key_node.value)) == "<<":
            continue
        here, where = (*path, key), f"{document.source}:{key_node.start_mark.line + 1}"
        if here in document.origins:
            document.mistakes.append(f"{where}: {'.'.join(here)}: duplicate key")
        document.origins[here] = where
        _note_origins(document, value_node, here)


#: Keys and variables, in lower case, that are never given on a command line, which all users of a
#: machine can read, and the variable to set in their place.
_SECRETS = {
    "api-key": "VLLM_API_KEY",
    "vllm-api-key": "VLLM_API_KEY",
    "hf-token": "HF_TOKEN",
    "hugging-face-hub-token": "HF_TOKEN",
}


def _apply_override(document: Document, text: str) -> None:
    """Applies one `--Service.key=value`; the value is parsed as YAML."""
    name, equals, value = text.removeprefix("--").partition("=")
    path = tuple(name.split("."))
    if not text.startswith("--") or not equals or len(path) < 2 or not all(path):
        # Not its value, which may be a secret.
        shown = text.partition("=")[0] if text.startswith("-") else redact(text)
        document.mistakes.append(
            f"{shown}: unknown option; overrides have the form --Service.key=value"
        )
        return
    try:
        parsed = parse_yaml(value, f"--{name}")
    except ConfigError as exc:
        document.mistakes += exc.mistakes
        return
    given = parsed if isinstance(parsed, dict) else {path[-1]: parsed}
    named = [_SECRETS.get(str(key).lower().replace("_", "-")) for key in given]
    if parsed not in (None, True, False) and (variable := next(filter(None, named), None)):
        document.mistakes.append(
            f"--{name}: a secret on the command line, which all users of this machine can read; put"
            f" it into the configuration file, or set the variable {variable}"
        )
        return
    node = document.tree
    for step in path[:-1]:
        if not isinstance(node.get(step), dict):
            node[step] = {}
        node = node[step]
    node[path[-1]] = parsed
    document.origins[path] = f"--{name}"


def kebab(name: str) -> str:
    return name.replace("_", "-")


def field_keys(kind: type) -> list[str]:
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
    kind: type[T],
    given: Mapping[str, Any],
    defaults: Mapping[str, Any] = MappingProxyType({}),
    accepted: Iterable[str] = (),
) -> T | None:
    """The options of `kind`; None after a mistake, which is added to `document`.

    given: with kebab-case keys. defaults: in place of those of `kind`, in snake_case. accepted: the
    keys to name if one is unknown; by itself those of `kind`.
    """
    before, hints = len(document.mistakes), get_type_hints(kind, include_extras=True)
    declared = dataclasses.fields(kind)  # pyright: ignore[reportArgumentType]
    fields = {kebab(field.name): field for field in declared}
    values = dict(defaults)
    for key, value in given.items():
        here = (*path, str(key))
        if (field := fields.get(str(key))) is None:
            document.complain(here, unknown_key(str(key), accepted or fields))
        else:
            values[field.name] = _value(document, here, hints[field.name], value)
    for key, field in fields.items():
        nothing = field.default is field.default_factory is dataclasses.MISSING
        if nothing and field.name not in values:
            document.complain((*path, key), "is required")
    if len(document.mistakes) > before:
        return None
    try:
        return kind(**values)
    except ValueError as exc:
        document.complain(path, str(exc))
        return None


def _value(document: Document, path: KeyPath, kind: Any, value: Any) -> Any:
    """None after a mistake."""
    if get_origin(kind) is tuple and isinstance(value, list):
        element = get_args(kind)[0]
        return tuple(_value(document, (*path, str(i)), element, v) for i, v in enumerate(value))
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        return fill(document, path, cast("type", kind), value)
    try:
        # Refuses "5" for 5 and 1 for true, but takes 5 for 5.0.
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as exc:
        expected = str(exc).partition(", got ")[0]
        if get_origin(kind) is Literal:
            expected = f"Expected {' or '.join(map(repr, get_args(kind)))}"
        got = json.dumps(value, default=str)
        document.complain(path, f"{expected[:1].lower()}{expected[1:]}, got {got}")
        return None
