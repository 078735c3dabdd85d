"""What keeps processes and servers running when they cannot be spawned for a while."""

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.runtime.backoff import Backoff
from dynamo_lite.serve import instance_supervisor
from dynamo_lite.serve.child_process import ChildProcess, Launch
from dynamo_lite.serve.embedded import EmbeddedServer
from dynamo_lite.serve.instance_supervisor import InstanceSupervisor
from dynamo_lite.serve.lease_revoker import LeaseRevoker
from dynamo_lite.serve.processes import is_alive
from dynamo_lite.serve.progress import Progress

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

#: An exit code after it was ready, an exit code before, or why it cannot be spawned.
Life = tuple[int, bool] | str


class Children:
    """Takes the place of `ChildProcess`."""

    #: What one reports that ends before it is ready.
    error = ""

    def __init__(self, *lives: Life):
        self.left = list(lives)
        self.pid = 1

    def __call__(self, launch: Launch) -> Self:
        return self

    async def __aenter__(self) -> Self:
        if isinstance(self.left[0], str):
            raise StartupError(str(self.left.pop(0)))
        return self

    async def __aexit__(self, *_: type[BaseException] | TracebackType | object) -> None: ...

    async def run(self, on_report: Callable[[dict[str, Any]], None]) -> int:
        life = self.left.pop(0)
        assert not isinstance(life, str)
        failed = {"state": "failed", "error": self.error}
        on_report({"state": "ready"} if life[1] else failed)
        return life[0]


def launch_in(folder: Path) -> Launch:
    return Launch(
        service="Back",
        instance=0,
        plan_path=folder / "plan.json",
        log_path=folder / "logs" / "Back-0.log",
        env=dict(os.environ),
    )


@pytest.fixture
def keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    async def kept(needed: bool, *lives: Life) -> InstanceSupervisor:
        """Runs until it has left. All lives must have been lived."""
        children = Children(*lives)
        monkeypatch.setattr(instance_supervisor, "ChildProcess", children)
        one = InstanceSupervisor(
            launch_in(tmp_path),
            Backoff(first_s=0.001),
            LeaseRevoker("http://127.0.0.1:1"),
            Progress(),
            lambda: None,
            needed=needed,
        )
        async with asyncio.timeout(10):
            await one.keep()
        assert children.left == []
        return one

    return kept


@pytest.mark.parametrize("needed", [True, False])
async def test_a_process_that_was_ready_is_spawned_until_that_succeeds(
    keep: Any, needed: bool, capsys: pytest.CaptureFixture[str]
):
    """Its end and that of the whole graph would be worse than its absence."""
    lives = [(1, True), "no log folder", "no log folder", (0, True)]
    one = await keep(needed, *lives)
    assert (one.state.state, one.state.restarts, one.state.error) == ("stopped", 3, "")
    assert capsys.readouterr().err.count("not started: no log folder; restarting in") == 2


async def test_a_first_spawn_that_fails(keep: Any):
    with pytest.raises(StartupError, match="no log folder"):
        await keep(True, "no log folder")
    one = await keep(False, "no log folder")
    assert (one.state.state, one.state.error) == ("failed", "no log folder")


_PYDANTIC = """ValidationError: 1 error for A
  Value error, Sleep mode is not supported. [type=value_error, input_value={'a': [1]}, input_type=A]
    For further information visit https://errors.pydantic.dev/2/v/value_error"""
_ELSEWHERE = "RuntimeError: Engine core initialization failed. See root cause above."


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (
            _PYDANTIC,
            "ValidationError: 1 error for A Value error, Sleep mode is not supported",
        ),
        (_ELSEWHERE, "ValueError: the largest max_model_len is 9"),
        ("a model without sleep", "a model without sleep"),
        ("", "ended before it was ready (exit 1)"),
    ],
)
async def test_the_last_line_of_a_failed_start_has_the_cause(
    tmp_path: Path, keep: Any, capsys: Any, monkeypatch: Any, error: str, cause: str
):
    monkeypatch.setattr(Children, "error", error)
    (tmp_path / "logs").mkdir()
    raised = "(EngineCore pid=7) ValueError: the largest max_model_len is 9"
    (tmp_path / "logs/Back-0.log").write_text(f"{raised}\n\n{_ELSEWHERE}\nShutting down\n")
    with pytest.raises(StartupError) as caught:
        await keep(True, (1, False))
    assert str(caught.value) == f"Back-0: {cause}"
    assert capsys.readouterr().err.endswith("\n  Shutting down\n")


class Dies(Children):
    """Ends with SIGKILL after it was ready, and then in order; notes what is done with it."""

    def __init__(self, done: list[str]):
        super().__init__((-9, True), (0, True))
        self.done = done

    async def run(self, on_report: Callable[[dict[str, Any]], None]) -> int:
        code = await super().run(on_report)
        on_report({"state": "ready", "lease": "7f"})
        return code

    def kill(self) -> None:
        self.done.append("rest killed")

    async def __aexit__(self, *_: object) -> None:
        self.done.append("group empty")


class Revoker(LeaseRevoker):
    def __init__(self, done: list[str]):
        super().__init__("http://127.0.0.1:1")
        self.done = done

    async def revoke(self, lease_id: int) -> bool:
        self.done.append(f"{lease_id:x} revoked")
        return True


async def test_run_json_and_others_hear_of_a_death_before_the_group_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    done: list[str] = []
    monkeypatch.setattr(instance_supervisor, "ChildProcess", Dies(done))

    def written() -> None:
        done.append(f"{one.state.state} {one.state.pid}")

    backoff, launch = Backoff(first_s=0.001), launch_in(tmp_path)
    one = InstanceSupervisor(launch, backoff, Revoker(done), Progress(), written)
    async with asyncio.timeout(10):
        await one.keep()
    life, died = ["starting 1", "ready 1"], ["backoff 0", "rest killed", "7f revoked"]
    end = ["group empty", "stopped 0"]
    assert done == [*life, *died, "group empty", "backoff 0", *life, *end]


async def test_why_a_process_cannot_be_spawned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(StartupError, match=r"Back-0: cannot start its process: .*No such file"):
        async with ChildProcess(launch_in(tmp_path)):
            pytest.fail("its log has no folder")

    def no_pipe() -> tuple[int, int]:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "pipe", no_pipe)
    with pytest.raises(StartupError, match=r"Back-0: cannot start its process: .*Too many open"):
        async with ChildProcess(launch_in(tmp_path)):
            pytest.fail("it has no pipe")


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
