"""A command that a test starts, what it says, and its end."""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Self, TypeVar

from dynamo_lite.runtime.process.death_signal import death_signal_hook
from dynamo_lite.serve.processes import is_alive

ROOT = Path(__file__).resolve().parents[1]
PATIENCE_S = 60.0
#: For what imports vLLM.
VLLM_PATIENCE_S = 200.0
#: Until it has ended, and then all that it has started.
_END_S, _LEFT_S = 90.0, 20.0
_POLL_S = 0.02

T = TypeVar("T")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts background jobs so, and what these tests start would inherit it:
    # an ignored Ctrl-C is none.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    # As under nohup. A child ignores what its parent ignores, but not what its parent handles.
    signal.signal(signal.SIGHUP, lambda *_: None)


def eventually(condition: Callable[[], T], what: str, timeout_s: float = PATIENCE_S) -> T:
    """Asks until `condition` is true and returns what it gave. Fails with its last answer."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what} ({value!r})"
        time.sleep(_POLL_S)


class Started:
    """A command in a session of its own. It dies with the thread that has started it.

    Entering it starts it. On the way out it gets `last_signal` if it still runs, and then nothing
    that it has started may be left. env: the whole environment; None: ours. log: keeps its output.
    """

    last_signal = signal.SIGINT

    def __init__(
        self,
        command: Sequence[str],
        *,
        cwd: Path = ROOT,
        env: Mapping[str, str] | None = None,
        log: Path | None = None,
    ):
        self._command, self._cwd, self._env = list(command), cwd, env
        self._log, self._said = log, ""
        self._output: IO[bytes] | None = None
        self._read = 0
        self._running: subprocess.Popen[bytes] | None = None
        self._family: set[int] = set()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        self.end(signal.SIGKILL if failed else self.last_signal)

    def start(self) -> None:
        self._output = tempfile.TemporaryFile() if self._log is None else self._log.open("w+b")
        self._running = subprocess.Popen(
            self._command,
            cwd=self._cwd,
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            start_new_session=True,
            preexec_fn=death_signal_hook(),
        )

    @property
    def pid(self) -> int:
        assert self._running is not None
        return self._running.pid

    @property
    def exit_code(self) -> int | None:
        assert self._running is not None
        return self._running.poll()

    @property
    def output(self) -> str:
        """What it has said, to both streams."""
        if self._output is not None:
            file = self._output.fileno()
            self._said = os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")
        return self._said

    def wait_line(self, text: str, timeout_s: float = PATIENCE_S) -> str:
        """The next line that contains `text`."""
        deadline = time.monotonic() + timeout_s
        while True:
            over = self.exit_code is not None or time.monotonic() > deadline
            lines = self.output.splitlines(keepends=True)
            while self._read < len(lines) and lines[self._read].endswith("\n"):
                self._read += 1
                if text in lines[self._read - 1]:
                    return lines[self._read - 1]
            assert not over, f"no {text!r} in: {self.output}"
            time.sleep(_POLL_S)

    def wait_until(self, ready: Callable[[], bool], timeout_s: float) -> None:
        """Fails with what it said when it ends or is not ready in time."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            late = time.monotonic() > deadline
            if late or self.exit_code is not None:
                why = f"not ready in {timeout_s:g} s" if late else f"ended with {self.exit_code}"
                self.end(signal.SIGKILL)
                raise AssertionError(f"{' '.join(self._command)}: {why}\n{self.tails()}")
            time.sleep(_POLL_S)

    def signal(self, sig: int) -> None:
        """If it still runs. `end` then waits."""
        self._family |= set(descendants_of(self.pid))
        if self.exit_code is None:
            os.kill(self.pid, sig)

    def end(self, sig: int | None = None) -> int:
        """Waits for the end, after this signal, and returns the exit code. Kills what does not end,
        and fails if one of its processes is left."""
        assert self._running is not None
        if sig is not None:
            self.signal(sig)
        try:
            code = self._running.wait(_END_S)
            eventually(lambda: not self.left(), f"all of {self._command} has ended", _LEFT_S)
            return code
        finally:
            self._running.kill()
            for pid in self.left():
                send(pid, signal.SIGKILL)
            self._running.wait()
            self._close()

    def _close(self) -> None:
        """What it has said stays readable."""
        self._said = self.output
        if self._output is not None:
            self._output.close()
            self._output = None

    def left(self) -> list[int]:
        """Those of its processes that should have ended with it."""
        return [pid for pid in self._family if is_alive(pid)]

    def tails(self) -> str:
        """The end of what it has said."""
        return "\n".join(self.output.splitlines()[-40:])


def send(pid: int, sig: int) -> None:
    """To a process that may have ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, sig)


def _stats() -> Iterator[tuple[int, list[str]]]:
    """Process id, and state, parent, process group and more, of each process."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            yield int(stat.parent.name), stat.read_text(errors="replace").rpartition(")")[2].split()


def group_members(group: int) -> list[int]:
    """Process ids, zombies apart, of a process group."""
    return [pid for pid, (state, _, own, *_) in _stats() if int(own) == group and state != "Z"]


def children_of(parent: int) -> list[int]:
    return [pid for pid, (_, its, *_) in _stats() if int(its) == parent]


def descendants_of(pid: int) -> list[int]:
    """Every process below `pid`, zombies apart."""
    parents = {child: int(its) for child, (state, its, *_) in _stats() if state != "Z"}
    found = [pid]
    for parent in found:
        found += [child for child, of in parents.items() if of == parent]
    return found[1:]
