"""Components of workers, forked by a process that has imported vLLM once.

Importing vLLM takes a process 4 to 6 s of processor time. The fork server of `multiprocessing`
imports it once (`preload.py`) and forks the component of each worker. It has one thread, no device
and no connection, so that a fork of it is as good as a new process. A worker whose environment is
not that of the server executes a new interpreter, since modules read variables when they are
imported.

An engine's own processes cannot be forked like this: vLLM starts them from the component, which has
threads and connections by then, and its CPU build always starts them with `spawn`.
"""

import asyncio
import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping
from multiprocessing import forkserver, reduction
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from dynamo_lite.runtime.process.death_signal import die_with_parent
from dynamo_lite.serve import child
from dynamo_lite.serve.child_environment import become_child, environment

_CONTEXT = multiprocessing.get_context("forkserver")

#: In place of the exit code of a child whose fork server has ended, which ends its children, too.
SERVER_LOST = 255


def start_fork_server(env: Mapping[str, str]) -> None:
    """Starts it, and does not wait until it has imported vLLM. env: its whole environment.

    To be called in the main thread: the server dies with the thread that starts it.
    """
    _CONTEXT.set_forkserver_preload(["dynamo_lite.serve.preload"])
    with environment(env):
        forkserver.ensure_running()


class ForkedProcess:
    """A child of the fork server. It looks like an `asyncio.subprocess.Process`."""

    def __init__(self, process: ForkServerProcess):
        self._process = process
        assert process.pid is not None
        self.pid: int = process.pid
        self.returncode: int | None = None

    def send_signal(self, sig: int) -> None:
        """Raises ProcessLookupError."""
        os.kill(self.pid, sig)

    async def wait(self) -> int:
        """Returns the exit code, the negative number of its last signal, or SERVER_LOST."""
        if self.returncode is None:
            loop, ended = asyncio.get_running_loop(), asyncio.Event()
            loop.add_reader(self._process.sentinel, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(self._process.sentinel)
            self.returncode = self._process.exitcode
            assert self.returncode is not None
        return self.returncode


async def fork(
    plan: Path, env: Mapping[str, str], *, report_fd: int, output_fd: int
) -> ForkedProcess:
    """Runs the plan in a process that leads a process group. env: its whole environment.

    Waits until the fork server has imported vLLM. Raises OSError when there is no process.
    """
    descriptors = (_Descriptor(report_fd), _Descriptor(output_fd))
    process = _CONTEXT.Process(target=_run, args=(str(plan), dict(env), *descriptors))
    starting = asyncio.get_running_loop().run_in_executor(None, process.start)
    try:
        await asyncio.shield(starting)
    except asyncio.CancelledError:
        starting.add_done_callback(lambda _: _kill(process))
        raise
    except EOFError as exc:
        raise OSError("the fork server has ended") from exc
    return ForkedProcess(process)


def _kill(process: ForkServerProcess) -> None:
    with contextlib.suppress(ProcessLookupError):
        if process.pid is not None:
            os.kill(process.pid, signal.SIGKILL)


class _Descriptor:
    """A file descriptor on its way into the child."""

    def __init__(self, number: int):
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (reduction.DupFd(self.number),)


def _received(passed: Any) -> _Descriptor:
    return _Descriptor(passed.detach())


def _run(plan: str, env: dict[str, str], report: _Descriptor, output: _Descriptor) -> None:
    """The child, from fork to end."""
    os.setsid()
    die_with_parent()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output.number, 1), (output.number, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(output.number)
    os.set_inheritable(report.number, True)
    if not become_child(env):
        os.execve(sys.executable, child.command(Path(plan), report.number), env)
    # Processes that vLLM starts with `spawn` import it, as if it had been executed.
    sys.modules["__main__"] = child
    child.leave(child.run(Path(plan), report.number))
