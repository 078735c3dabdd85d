"""The process of vLLM's Rust frontend (`vllm-rs`): start, log lines, health, drain, end."""

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import socket
from collections import deque
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, Self

import httpx

from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.runtime.process.death_signal import death_signal_hook
from dynamo_lite.runtime.tasks import OwnedTasks, first_of

logger = logging.getLogger(__name__)

_READY_S = 300.0
_LINE_BYTES = 1 << 20

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
#: `(RustFrontend pid=9) INFO 11-22 13:34:20 [hf.rs:227] text`
_LINE = re.compile(
    r"(?:\([^)]*\) )?(TRACE|DEBUG|INFO|WARN(?:ING)?|ERROR) \d\d-\d\d \d\d:\d\d:\d\d (.*)"
)
_LEVELS = logging.getLevelNamesMapping()


class RustProcess:
    """Async context manager; leaving it kills the process. It dies with this process, too.

    binary: `vllm-rs`. http: the bound socket of the HTTP server. inputs, outputs: listening
    sockets for the engine-core protocol. arguments: of `vllm serve`, by name in snake_case.
    """

    #: Pause between two health requests, and timeout of one.
    period_s, answer_s = 3.0, 3.0
    #: After this many failed health requests in a row, about 30 s without an answer, it is killed.
    #: They are counted, so that a pause of this process is one failure at most.
    most_failures = 5
    #: How long it may take to end.
    end_s = 3.0

    def __init__(
        self,
        binary: Path,
        *,
        http: socket.socket,
        inputs: socket.socket,
        outputs: socket.socket,
        arguments: Mapping[str, Any],
    ):
        self._sockets = (http, inputs, outputs)
        self._command = [
            str(binary),
            "frontend",
            *(f"--listen-fd={http.fileno()}",),
            *(f"--input-listener-fd={inputs.fileno()}",),
            *(f"--output-listener-fd={outputs.fileno()}",),
            *("--args-json", json.dumps(arguments)),
        ]
        self._process: asyncio.subprocess.Process | None = None
        self._tasks = OwnedTasks()
        self._last_lines: deque[str] = deque(maxlen=5)
        self._draining = False
        #: Why it cannot serve requests, by its last health request; empty if it can.
        self.unhealthy = ""

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._process is not None and self._process.returncode is not None

    async def __aenter__(self) -> Self:
        """Raises StartupError if the program cannot be started."""
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                limit=_LINE_BYTES,
                pass_fds=[sock.fileno() for sock in self._sockets],
                preexec_fn=death_signal_hook(signal.SIGKILL),
            )
        except OSError as exc:
            raise StartupError(f"cannot start {self._command[0]}: {exc}") from exc
        self._tasks.start(self._log(self._process), name="log of vllm-rs")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._draining = True
        if self._process is not None:
            self._signal(signal.SIGKILL)
            await self._process.wait()
        await self._tasks.end()

    def _signal(self, number: signal.Signals) -> None:
        """Not by `send_signal`, which may reap the process before asyncio does."""
        if self.ended:
            return
        # asyncio reaps an ended process in a thread, and `ended` is true a moment later.
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    async def wait_ready(self, url: str) -> None:
        """Returns when it answers HTTP requests at `url`. Raises StartupError."""
        assert self._process is not None
        failure = ""

        async def ask() -> None:
            nonlocal failure
            if failure := await _failure(url, _READY_S):
                # If the process is ending, its code and its last lines say more.
                await asyncio.sleep(self.end_s)

        await first_of(self._process.wait(), ask())
        if self.ended:
            raise StartupError(f"vllm-rs ended with code {self._process.returncode}: {self}")
        if failure:
            raise StartupError(f"vllm-rs is not ready: {failure}: {self}")

    async def run(self, url: str) -> None:
        """Returns at the end of a drain. Updates `unhealthy` by health requests to `url`.

        Raises RuntimeError if the process ends by itself, or if it was killed because it had not
        answered for long.
        """
        assert self._process is not None
        await first_of(self._process.wait(), self._check_health(url))
        if self._draining:
            await self._process.wait()
        elif self.ended:
            code = self._process.returncode
            raise RuntimeError(f"vllm-rs ended with code {code}; its lines are in the log")
        else:
            self._signal(signal.SIGKILL)
            raise RuntimeError(f"vllm-rs was killed: {self.unhealthy}")

    async def _check_health(self, url: str) -> None:
        """Returns in a drain, and when too many health requests have failed."""
        failures = 0
        while failures < self.most_failures:
            await asyncio.sleep(self.period_s)
            if self._draining:
                return
            before, self.unhealthy = self.unhealthy, await _failure(url, self.answer_s)
            failures = failures + 1 if self.unhealthy else 0
            if self.unhealthy and not before:
                logger.warning("vllm-rs is unhealthy: %s", self.unhealthy)
            elif before and not self.unhealthy:
                logger.info("vllm-rs is healthy again")

    async def drain(self, grace_s: float) -> None:
        """Stops accepting connections; open answers may finish within `grace_s`."""
        assert self._process is not None
        self._draining = True
        if self.ended:
            return
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s + self.end_s):
                await self._process.wait()
        except TimeoutError:
            logger.warning("vllm-rs did not end within %g s; it is killed", grace_s + self.end_s)

    def __str__(self) -> str:
        return "; ".join(self._last_lines) or "it has logged nothing"

    async def _log(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while True:
            try:
                raw = await process.stdout.readline()
            except ValueError:
                continue  # the reader has dropped a line over the limit
            if not raw:
                return
            line = _COLOURS.sub("", raw.decode(errors="replace")).rstrip()
            if line:
                self._last_lines.append(line)
                found = _LINE.fullmatch(line)
                level = logging.INFO if found is None else _LEVELS.get(found[1], logging.DEBUG)
                logger.log(level, "vllm-rs: %s", line if found is None else found[2])


async def _failure(url: str, answer_s: float) -> str:
    """Why a health request failed; empty if it did not. The connection waits in the socket's
    backlog until the process accepts it."""
    try:
        async with (
            asyncio.timeout(answer_s),
            # Not through a proxy of the environment.
            httpx.AsyncClient(verify=False, trust_env=False, timeout=None) as client,
        ):
            status = (await client.get(f"{url}/health")).status_code
    except TimeoutError:
        return f"timeout: it has not answered a health request within {answer_s:g} s"
    except httpx.HTTPError as exc:
        return f"its health request failed: {exc!r}"
    return "" if status == HTTPStatus.OK else f"it answered {status} on /health"
