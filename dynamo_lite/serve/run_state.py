"""`run.json`: a running graph's servers and processes, for other commands.

It is replaced atomically, readable only by its owner (URLs may contain credentials), and
removed when the graph ends. A lock file beside it keeps two graphs from using one state
directory, and says whether the graph of a `run.json` still runs: a pid may be another process's.
"""

import contextlib
import fcntl
import os
import struct
from pathlib import Path

import msgspec

from dynamo_lite.protocol.errors import StartupError

#: `struct flock` (fcntl(2)): type, whence, start, length, pid. Length 0 is the whole file.
_LOCK = struct.Struct("hhqqi")
_WHOLE_FILE = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


class ProcessState(msgspec.Struct, kw_only=True):
    service: str
    instance: int
    #: waiting, starting, ready, draining, backoff, stopped or failed (it was added and could not
    #: be started).
    state: str = "waiting"
    pid: int = 0
    lease: str = ""
    status_url: str = ""
    restarts: int = 0
    log: str = ""
    #: Why it has failed.
    error: str = ""


class ServerState(msgspec.Struct, kw_only=True):
    name: str
    #: 0 while it is being restarted.
    pid: int
    restarts: int = 0


class RunState(msgspec.Struct, kw_only=True):
    version: int = 1
    #: Of the supervisor.
    pid: int
    #: Seconds since the epoch.
    started_at: float
    graph: str
    namespace: str
    #: starting, ready or draining.
    state: str = "starting"
    #: URL of the Frontend; empty until it is ready and where none runs.
    http: str = ""
    nats: str = ""
    etcd: str = ""
    #: The folder with the graph's certificates; empty if it has none.
    certificates: str = ""
    processes: list[ProcessState] = []
    #: The embedded servers.
    servers: list[ServerState] = []

    @property
    def folder(self) -> Path | None:
        return Path(self.certificates) if self.certificates else None


def write_run(state_dir: Path, state: RunState) -> None:
    """Raises OSError."""
    text = msgspec.json.format(msgspec.json.encode(state), indent=2)
    write_private(run_file(state_dir), text + b"\n")


def run_file(state_dir: Path) -> Path:
    return state_dir / "run.json"


def read_run(state_dir: Path) -> RunState | None:
    """The graph that runs on this state directory; None if none runs."""
    try:
        state = msgspec.json.decode(run_file(state_dir).read_bytes(), type=RunState)
    except (OSError, msgspec.DecodeError):
        return None
    return state if _is_locked(state_dir) else None


def running_certificates(running: RunState | None, namespace: str) -> Path | None:
    """The folder of the running graph of this namespace; None if it has none, or none runs."""
    return running.folder if running is not None and running.namespace == namespace else None


def write_private(path: Path, content: bytes) -> None:
    """Writes `path` atomically, readable only by its owner."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    temporary.replace(path)


def lock(directory: Path, stack: contextlib.ExitStack) -> bool:
    """Locks `directory` until the stack is closed. Returns False if another process has locked it.

    Raises StartupError when the directory cannot be created or written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(_lock_file(directory), os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as exc:
        raise StartupError(f"cannot write to state directory {directory}: {exc.strerror}") from exc
    stack.callback(os.close, descriptor)
    try:
        # Ends with the descriptor. Unlike one of flock(2), others can see it without taking it.
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _WHOLE_FILE)
    except BlockingIOError:
        return False
    return True


def _is_locked(directory: Path) -> bool:
    try:
        with _lock_file(directory).open("rb") as file:
            found = fcntl.fcntl(file, fcntl.F_OFD_GETLK, _WHOLE_FILE)
    except OSError:
        return False
    return bool(_LOCK.unpack(found)[0] != fcntl.F_UNLCK)


def _lock_file(directory: Path) -> Path:
    return directory / "lock"
