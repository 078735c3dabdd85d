"""The user's YAML and `--Service.key=value` overrides as one tree with origins.

Owns where every value came from, so that a mistake can name its file and line
or the flag that carried it. What the values mean is `config.py`'s business.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dynamo_lite.protocol.errors import ConfigError

KeyPath = tuple[str, ...]


@dataclass(kw_only=True)
class Document:
    """tree: sections to their contents. origins: where each path was written."""

    source: str
    tree: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, str] = field(default_factory=dict)
    mistakes: list[str] = field(default_factory=list)

    def where(self, path: KeyPath) -> str:
        """Origin of the nearest written ancestor of `path`, e.g. "agg.yaml:12"."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
        return self.source

    def complain(self, path: KeyPath, message: str) -> None:
        where, name = self.where(path), ".".join(path)
        # The flag of an override is the path already.
        self.mistakes.append(
            f"{where}: {message}" if where == f"--{name}" else f"{where}: {name}: {message}"
        )

    def raise_mistakes(self) -> None:
        """Raises ConfigError if there are any."""
        if self.mistakes:
            raise ConfigError(self.mistakes)


def read_document(file: Path | None, overrides: list[str]) -> Document:
    """Reads `file` and lays `overrides` over it.

    Raises ConfigError when the file cannot be read or is not YAML at all; lesser
    mistakes are collected in the document.
    """
    document = Document(source=str(file) if file else "(no file)")
    if file is not None:
        _read_file(document, file)
    for text in overrides:
        _apply_override(document, text)
    return document


def _read_file(document: Document, file: Path) -> None:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError([f"{file}: cannot be read: {exc}"]) from exc
    loader = yaml.CSafeLoader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return
        _note_origins(document, root, ())
        tree = loader.construct_document(root)
    except (yaml.YAMLError, ValueError) as exc:
        raise ConfigError([f"{file}: not valid YAML: {' '.join(str(exc).split())}"]) from exc
    finally:
        loader.dispose()
    if not isinstance(tree, dict):
        raise ConfigError([f"{file}: expected sections such as `Frontend:`, got {tree!r}"])
    document.tree = tree


def _note_origins(document: Document, node: yaml.Node, path: KeyPath) -> None:
    """Records the line of every key and complains about keys written twice."""
    if not isinstance(node, yaml.MappingNode):
        return
    seen: set[str] = set()
    for key_node, value_node in node.value:
        key = str(key_node.value)
        here = (*path, key)
        if key in seen:
            line = key_node.start_mark.line + 1
            name = ".".join(here)
            document.mistakes.append(f"{document.source}:{line}: {name}: written twice")
        seen.add(key)
        document.origins[here] = f"{document.source}:{key_node.start_mark.line + 1}"
        _note_origins(document, value_node, here)


def _apply_override(document: Document, text: str) -> None:
    """Lays one `--Service.key=value` over the tree; the value is read as YAML."""
    name, equals, value = text.removeprefix("--").partition("=")
    path = tuple(name.split("."))
    if not text.startswith("--") or not equals or len(path) < 2 or not all(path):
        document.mistakes.append(f"{text}: not an option; overrides look like --Service.key=value")
        return
    try:
        parsed = yaml.load(value, Loader=yaml.CSafeLoader)
    except (yaml.YAMLError, ValueError) as exc:
        document.mistakes.append(f"{text}: not valid YAML: {' '.join(str(exc).split())}")
        return
    node: dict[str, Any] = document.tree
    for step in path[:-1]:
        child = node.get(step)
        if not isinstance(child, dict):
            child = node[step] = {}
        node = child
    node[path[-1]] = parsed
    document.origins[path] = f"--{name}"
