"""A graph of tiny components: real process host, real servers, no engine."""

import asyncio
import os
import signal
import subprocess
import threading
from dataclasses import dataclass
from typing import Any

from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.serve.services.services import Graph, Service


@dataclass(frozen=True, kw_only=True)
class StubConfig:
    """fail: "start" to be refused, "crash" to die at the start by a signal.

    fail_if: a file; while it exists, starts are refused.
    grandchild: also run a process in the same group that ignores SIGTERM.
    ready, release, closed: files for which the start, the drain and the end wait.
    linger: leave a call of `asyncio.to_thread` that never ends.
    """

    fail: str = ""
    fail_if: str = ""
    grandchild: bool = False
    ready: str = ""
    release: str = ""
    closed: str = ""
    linger: bool = False
    host: str = "127.0.0.1"
    port: int = 0


class StubComponent:
    def __init__(self, config: dict[str, Any]):
        self._config = config
        self._child: subprocess.Popen[bytes] | None = None

    async def start(self, host: Any) -> dict[str, Any]:
        fail_if = self._config["fail_if"]
        if self._config["fail"] == "start" or (fail_if and os.path.exists(fail_if)):
            print("the last line of the log", flush=True)
            raise StartupError("told to fail")
        if self._config["fail"] == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._config["grandchild"]:
            self._child = subprocess.Popen(["sh", "-c", "trap '' TERM; sleep 600 & wait; wait"])
        if self._config["linger"]:
            asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)
        host.stack.push_async_callback(self._closed, host.spec.component)
        host.progress("stubbing")
        await _file(self._config["ready"])
        await host.register("generate")
        return {"url": "http://127.0.0.1:1", "model": "stub"} if host.spec.watch_component else {}

    async def drain(self, grace_s: float) -> None:
        release = self._config["release"]
        if release:
            print(f"drain began pid={os.getpid()}", flush=True)
            await _file(release)

    async def _closed(self, name: str) -> None:
        await _file(self._config["closed"])
        print(f"closed {name}", flush=True)

    def health(self) -> dict[str, Any]:
        return {"ok": True}


async def _file(path: str) -> None:
    """Waits for a file; not at all without a name."""
    while path and not os.path.exists(path):
        await asyncio.sleep(0.02)


def _service(name: str, *, calls: str = "", scalable: bool = False) -> Service:
    component = "tests.process.stub:StubComponent"
    return Service(
        name=name, config=StubConfig, component=component, calls=calls, scalable=scalable
    )


Modelled = Graph(
    services=(
        Service(
            name="Vllm", config=StubConfig, component="tests.process.stub:Stub", flags="engine"
        ),
    )
)

Front = _service("Front", calls="Back").link(_service("Back", scalable=True))
