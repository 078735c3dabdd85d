"""`run.json`: what a running graph tells other commands about itself.

Written whole and atomically, readable by its owner only (URLs may carry
credentials), removed when the graph ends. A lock file beside it keeps two
graphs from sharing one state directory.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.serve.processes import is_alive


class ProcessState(msgspec.Struct, kw_only=True):
    """One process. state: waiting, starting, ready, draining, backoff or stopped."""

    service: str
    instance: int
    state: str = "waiting"
    pid: int = 0
    lease: str = ""
    status_url: str = ""
    restarts: int = 0
    log: str = ""


class ServerState(msgspec.Struct, kw_only=True):
    """An embedded server. pid: 0 while it is being started again."""

    name: str
    pid: int
    restarts: int = 0


class RunState(msgspec.Struct, kw_only=True):
    """state: starting, ready or draining. started_at: seconds since the epoch.

    http is empty until the Frontend is ready, and where none runs. servers: those
    that the graph brings along.
    """

    version: int = 1
    pid: int
    started_at: float
    graph: str
    namespace: str
    state: str = "starting"
    http: str = ""
    nats: str = ""
    etcd: str = ""
    processes: list[ProcessState] = []
    servers: list[ServerState] = []


class RunFile:
    """The file of one running graph; call `write` after each change of `state`."""

    def __init__(self, path: Path, state: RunState):
        self.path = path
        self.state = state

    def write(self) -> None:
        text = msgspec.json.format(msgspec.json.encode(self.state), indent=2)
        write_private(self.path, text + b"\n")

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def read_run(state_dir: Path) -> RunState | None:
    """The graph that runs on this state directory; None when there is none (any more)."""
    try:
        state = msgspec.json.decode((state_dir / "run.json").read_bytes(), type=RunState)
    except (OSError, msgspec.DecodeError):
        return None
    return state if is_alive(state.pid) else None


def write_private(path: Path, content: bytes) -> None:
    """Replaces `path` atomically with a file that only its owner can read."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    temporary.replace(path)


@contextlib.contextmanager
def lock(directory: Path) -> Iterator[bool]:
    """Holds `directory` for this process; yields False when another process does.

    Raises StartupError when the directory cannot be made or written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as exc:
        raise StartupError(f"state directory {directory}: {exc.strerror}") from exc
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held = True
    except BlockingIOError:
        held = False
    try:
        yield held
    finally:
        os.close(descriptor)
