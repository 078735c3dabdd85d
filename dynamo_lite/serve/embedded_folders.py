"""The folders of a state directory that hold only an embedded server's data, so may be emptied."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from dynamo_lite.protocol.errors import ConfigError, StartupError

#: The file in such a folder by which a later start recognises it.
MARKER = ".dynamo-lite-embedded"


def folder_of(state_dir: Path, server: str) -> Path:
    """server: nats or etcd."""
    return state_dir / "embedded" / server


def is_marked(folder: Path) -> bool:
    """Whether it has the marker file. Raises StartupError if that cannot be told."""
    try:
        return (folder / MARKER).is_file()
    except OSError as exc:
        raise _no_access(folder, exc) from exc


def mark(folder: Path) -> None:
    """Makes the folder if there is none. `check_folders` comes first. Raises StartupError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MARKER).touch()
    except OSError as exc:
        raise _no_access(folder, exc) from exc


def check_folders(folders: Sequence[Path]) -> None:
    """Raises ConfigError if a folder has files but no marker file; StartupError if one cannot be
    read."""
    foreign = [folder for folder in folders if not is_marked(folder) and _content(folder)]
    if foreign:
        raise ConfigError(
            [
                f"--state-dir: {folder} is not empty and has no marker file {MARKER}, so it"
                " may hold foreign data; nothing was removed; choose another --state-dir"
                for folder in foreign
            ]
        )


def empty_folders(folders: Sequence[Path]) -> None:
    """Makes empty folders for embedded servers; data of earlier runs is removed.

    Raises what `check_folders` raises, and removes nothing then; StartupError when one cannot be
    emptied.
    """
    check_folders(folders)
    for folder in folders:
        # The marker is written first and never removed, so that the next start recognises the
        # folder of a killed server.
        mark(folder)
        try:
            for path in _content(folder):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        except OSError as exc:
            raise _no_access(folder, exc) from exc


def _content(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.name != MARKER]
    except FileNotFoundError:
        return []
    except OSError as exc:
        raise _no_access(folder, exc) from exc


def _no_access(folder: Path, exc: OSError) -> StartupError:
    return StartupError(f"cannot use the embedded server's folder {folder}: {exc}")
