"""The fork server: workers are forked from a process that has imported vLLM once."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from dynamo_lite.runtime.process.component import ProcessSpec
from dynamo_lite.serve.child import ChildPlan
from dynamo_lite.serve.child_environment import child_environment
from dynamo_lite.serve.child_process import ChildProcess, Launch
from dynamo_lite.serve.forking import SERVER_LOST, start_fork_server
from dynamo_lite.serve.processes import is_alive

pytestmark = pytest.mark.timeout(120)


class Waits:
    """A component whose constructor says what it is, and does not come back."""

    def __init__(self, config: dict[str, Any], spec: Any):
        print("output of", os.getpid(), flush=True)
        known = "vllm.v1.engine.core" in sys.modules
        main = getattr(sys.modules["__main__"].__spec__, "name", "")
        facts = {"vllm": known, "main": main, "own": os.environ.get("OWN", "")}
        Path(config["facts"]).write_text(json.dumps(facts))
        signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
        while True:
            signal.pause()


@pytest.fixture(scope="module")
def env() -> Iterator[dict[str, str]]:
    """The fork server's."""
    # vLLM's import sets this variable, and finds it set.
    env = child_environment({"OWN": "1", "TORCHINDUCTOR_COMPILE_THREADS": "3"})
    start_fork_server(env)
    yield env
    for left in servers():
        left.kill()


def servers() -> list[psutil.Process]:
    alive = [p for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE]
    return [p for p in alive if "forkserver" in " ".join(p.cmdline())]


def server() -> psutil.Process:
    [found] = servers()
    return found


@contextlib.asynccontextmanager
async def child(folder: Path, env: dict[str, str]) -> AsyncIterator[tuple[ChildProcess, Path]]:
    plan, facts = folder / "plan.json", folder / "facts.json"
    spec = ProcessSpec(
        namespace="t",
        component="Waits",
        instance=0,
        config={"facts": str(facts)},
        nats_url="nats://127.0.0.1:1",
        etcd_url="http://127.0.0.1:1",
        state_dir=str(folder),
    )
    component = f"{__name__}:{Waits.__name__}"
    plan.write_bytes(
        msgspec.json.encode(ChildPlan(component=component, spec=spec, logging={"version": 1}))
    )
    launch = Launch(
        service="Waits", instance=0, plan_path=plan, log_path=folder / "log", env=env, forks=True
    )
    async with ChildProcess(launch) as running, asyncio.timeout(60):
        while not facts.exists() or not facts.read_text():
            await asyncio.sleep(0.02)
        yield running, facts


async def test_a_fork_has_what_the_server_has_imported(tmp_path: Path, env: dict[str, str]):
    async with child(tmp_path, env) as (running, facts):
        assert json.loads(facts.read_text()) == {
            "vllm": True,
            "main": "dynamo_lite.serve.child",
            "own": "1",
        }
        assert psutil.Process(running.pid).ppid() == server().pid
        assert os.getpgid(running.pid) == os.getsid(running.pid) == running.pid
        assert f"output of {running.pid}" in (tmp_path / "log").read_text()
        running.terminate()
        assert await running.run(lambda report: None) == 7


async def test_the_signal_that_ended_it_is_known(tmp_path: Path, env: dict[str, str]):
    async with child(tmp_path, env) as (running, _):
        running.kill()
        assert await running.run(lambda report: None) == -signal.SIGKILL


async def test_another_environment_gets_an_interpreter_of_its_own(
    tmp_path: Path, env: dict[str, str]
):
    async with child(tmp_path, {**env, "OWN": "2"}) as (running, facts):
        found = json.loads(facts.read_text())
        assert (found["vllm"], found["own"]) == (False, "2")
        assert "dynamo_lite.serve.child" in psutil.Process(running.pid).cmdline()
        running.terminate()
        assert await running.run(lambda report: None) == 7


async def test_children_end_with_their_server_and_the_next_one_has_a_new_one(
    tmp_path: Path, env: dict[str, str]
):
    async with child(tmp_path, env) as (running, _):
        server().kill()
        assert await running.run(lambda report: None) == SERVER_LOST
    (tmp_path / "next").mkdir()
    async with child(tmp_path / "next", env) as (running, _):
        running.terminate()
        assert await running.run(lambda report: None) == 7


def test_nothing_outlives_a_killed_parent(tmp_path: Path):
    """Neither the server nor a child."""
    code = (
        "import asyncio; from pathlib import Path\n"
        "from tests.vllm.without_engines import test_forking as t\n"
        "env = t.child_environment({}); t.start_fork_server(env)\n"
        "async def main():\n"
        f"    async with t.child(Path({str(tmp_path)!r}), env) as (running, _):\n"
        "        print(t.server().pid, running.pid, flush=True); await asyncio.sleep(100)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2 and all(map(is_alive, pids))
        parent.kill()
    for pid in pids:
        psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=10)
        assert not is_alive(pid)
