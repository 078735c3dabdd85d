"""What keeps processes and servers running when they cannot be spawned for a while."""

import asyncio
import errno
import os
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.runtime.backoff import Backoff
from dynamo_lite.serve import instance_supervisor, processes
from dynamo_lite.serve.embedded import EmbeddedServer
from dynamo_lite.serve.instance_supervisor import InstanceSupervisor
from dynamo_lite.serve.launches import Launch
from dynamo_lite.serve.processes import is_alive
from dynamo_lite.serve.progress import Progress

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

#: A process of these tests: a shell script, whose `$0` is the descriptor of the pipe.
READY = 'echo \'{"state": "ready", "lease": "7f"}\' > /proc/self/fd/$0'


def lives(folder: Path, *scripts: str) -> Launch:
    """One process after the other; their log is in a folder."""
    for number, script in enumerate(scripts):
        (folder / f"life-{number}").write_text(script)
    (folder / "logs").mkdir(exist_ok=True)
    script = f"cd {folder}; life=$(ls -d life-* | head -n 1); mv $life lived-$life; . ./lived-$life"
    return Launch(
        service="Back",
        instance=0,
        command=("sh", "-c", script),
        log_path=folder / "logs" / "Back-0.log",
        env=dict(os.environ),
    )


def instance(
    launch: Launch, on_change: Callable[[], None] = lambda: None, *, needed: bool = True
) -> InstanceSupervisor:
    return InstanceSupervisor(
        launch,
        "http://127.0.0.1:1",
        Progress(),
        on_change,
        needed=needed,
        backoff=Backoff(first_s=0.001),
    )


@pytest.fixture(autouse=True)
def revoked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The leases that were revoked."""
    leases: list[str] = []

    async def revoke(_: str, lease_id: int) -> None:
        leases.append(f"{lease_id:x}")

    monkeypatch.setattr(instance_supervisor, "revoke_lease", revoke)
    return leases


async def kept(one: InstanceSupervisor) -> InstanceSupervisor:
    """Runs until it has left."""
    async with asyncio.timeout(30):
        await one.keep()
    return one


@pytest.mark.parametrize("needed", [True, False])
async def test_a_process_that_was_ready_is_spawned_until_that_succeeds(
    tmp_path: Path, needed: bool, capsys: pytest.CaptureFixture[str]
):
    """Its end and that of the whole graph would be worse than its absence."""
    logs, moved = tmp_path / "logs", tmp_path / "moved"

    def change() -> None:
        if one.state.restarts == 3 and moved.exists():
            moved.rename(logs)

    launch = lives(tmp_path, f"{READY}; mv logs moved; exit 1", f"{READY}; exit 0")
    one = instance(launch, change, needed=needed)
    await kept(one)
    assert (one.state.state, one.state.restarts, one.state.error) == ("stopped", 3, "")
    out = capsys.readouterr().err
    assert out.count("not started: Back-0: cannot start its process: ") == 2


async def test_a_first_spawn_that_fails(tmp_path: Path):
    launch = lives(tmp_path)
    (tmp_path / "logs").rmdir()
    why = "Back-0: cannot start its process: .*No such file"
    with pytest.raises(StartupError, match=why):
        await kept(instance(launch))
    one = await kept(instance(launch, needed=False))
    assert one.state.state == "failed" and re.match(why, one.state.error)


_PYDANTIC = """ValidationError: 1 error for A
  Value error, Sleep mode is not supported. [type=value_error, input_value={'a': [1]}, input_type=A]
    For further information visit https://errors.pydantic.dev/2/v/value_error"""
_KILLED = "Failed core proc(s): {'EngineCore_DP0': -9}"
_ELSEWHERE = "RuntimeError: Engine core initialization failed. See root cause above."


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (
            _PYDANTIC,
            "ValidationError: 1 error for A Value error, Sleep mode is not supported",
        ),
        (_ELSEWHERE, "ValueError: the largest max_model_len is 9"),
        (
            f"{_ELSEWHERE} {_KILLED}",
            f"{_ELSEWHERE} {_KILLED}; most likely the memory of the host or container did not"
            " suffice",
        ),
        ("a model without sleep", "a model without sleep"),
        ("", "ended before it was ready (exit 1)"),
    ],
)
async def test_the_last_line_of_a_failed_start_has_the_cause(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], error: str, cause: str
):
    report = msgspec.json.encode({"state": "failed", "error": error}).decode()
    (tmp_path / "report").write_text(f"{report}\n")
    raised = "(EngineCore pid=7) ValueError: the largest max_model_len is 9"
    (tmp_path / "said").write_text(f"{raised}\n\n{_ELSEWHERE}\nShutting down\n")
    launch = lives(tmp_path, "cat said; cat report > /proc/self/fd/$0; exit 1")
    with pytest.raises(StartupError) as caught:
        await kept(instance(launch))
    assert str(caught.value) == f"Back-0: {cause}"
    assert capsys.readouterr().err.endswith("\n  Shutting down\n")


async def test_run_json_and_others_hear_of_a_death_before_the_group_is_empty(
    tmp_path: Path, revoked: list[str], monkeypatch: pytest.MonkeyPatch
):
    async def end_group(process: asyncio.subprocess.Process, timeout_s: float) -> None:
        revoked.append("group empty")
        await processes.end_group(process, timeout_s)

    def written() -> None:
        revoked.append(f"{one.state.state} {'alive' if one.state.pid else 0}")

    monkeypatch.setattr(instance_supervisor, "end_group", end_group)
    one = instance(lives(tmp_path, f"{READY}; kill -9 $$", f"{READY}; exit 0"), written)
    await kept(one)
    life, died = ["starting alive", "ready alive"], ["backoff 0", "7f", "group empty"]
    assert revoked == [*life, *died, "backoff 0", *life, "group empty", "stopped 0"]


async def test_a_process_that_has_no_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def no_pipe() -> tuple[int, int]:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "pipe", no_pipe)
    with pytest.raises(StartupError, match=r"Back-0: cannot start its process: .*Too many open"):
        await kept(instance(lives(tmp_path)))


async def test_a_server_that_cannot_be_spawned_is_tried_again_by_its_owner(tmp_path: Path):
    """Its owner tries again after a StartupError, and ends the graph for any other."""
    server = Sleeper(tmp_path / "here")
    async with server:
        (tmp_path / "here").rename(tmp_path / "moved")
        with pytest.raises(StartupError, match=r"sleeper: cannot start its process: .*No such"):
            await server.restart()
        (tmp_path / "moved").rename(tmp_path / "here")
        await server.restart()
        assert is_alive(server.pid)


class Sleeper(EmbeddedServer):
    """A server that is ready at once."""

    name = "sleeper"

    def _command(self) -> list[str]:
        return ["sleep", "600"]

    async def _is_ready(self) -> bool:
        return True
