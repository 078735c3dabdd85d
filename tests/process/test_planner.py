"""A graph whose numbers of workers follow the load: real processes, servers and supervisor."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode_json
from dynamo_lite.protocol.live_options import LiveOptionsRecord
from dynamo_lite.runtime.etcd.store import EtcdStore
from dynamo_lite.serve.run_state import read_run
from tests.process.command import Serving, eventually, run, serving

pytestmark = pytest.mark.heavy

GRAPH = "tests.process.planned:Planned"
D, P = "VllmWorker", "PrefillWorker"
QUICK = {
    "tick-s": 0.3,
    "down-window-s": 4,
    "cooldown-s": 1,
    "start-s": 1,
    "budget-devices": 6,
}


class Planned:
    def __init__(self, graph: Serving, load: Path, fail_if: Path):
        self.graph, self._load, self.fail_if = graph, load, fail_if
        self.place = ("--state-dir", str(graph.state_dir))

    def load(self, **load: float) -> None:
        fresh = self._load.with_suffix(".new")
        fresh.write_text(json.dumps(load))
        fresh.replace(self._load)

    def ready(self) -> tuple[int, int]:
        """Of prefill and decode workers."""
        entries = self.graph.processes().values()
        states = [(entry["service"], entry["state"]) for entry in entries]
        return states.count((P, "ready")), states.count((D, "ready"))

    def until(self, *ready: int) -> None:
        eventually(lambda: self.ready() == ready, f"{ready} workers; {self.graph.output}", 120)

    def status(self) -> dict[str, Any]:
        """Also while no planner runs."""
        return json.loads(run("planner", "status", "--json", *self.place).stdout)

    def says(self, text: str) -> None:
        """Waits until `status` contains it."""
        eventually(lambda: text in run("planner", "status", *self.place).stdout, text)

    def until_quiet(self) -> None:
        eventually(lambda: not self.status()["operations"], "nothing is under way")


@contextmanager
def planned(directory: Path, *arguments: str, **options: Any) -> Iterator[Planned]:
    load, fail_if = directory / "load.json", directory / "fail"
    flags = [f"--Planner.{key}={value}" for key, value in {**QUICK, **options}.items()]
    flags += [f"--{name}.load={load}" for name in (D, P)] + [f"--{P}.fail-if={fail_if}"]
    with serving(
        directory / "state", *flags, "--Graph.grace-s=5", *arguments, graph=GRAPH
    ) as graph:
        graph.wait_line("ready ")
        yield Planned(graph, load, fail_if)


def test_a_step_of_the_load_is_followed_up_and_down(tmp_path: Path):
    with planned(tmp_path) as graph:
        graph.load(tokens_per_s=2000, jobs=2, requests=15)
        graph.until(3, 2)
        graph.until_quiet()
        planner = graph.graph.processes()["Planner-0"]
        os.kill(planner["pid"], signal.SIGKILL)
        graph.graph.when("Planner-0", lambda p: p["state"] == "ready" and p["restarts"] == 1)
        graph.load()
        graph.until(1, 1)
        graph.until_quiet()
        assert {p["restarts"] for n, p in graph.graph.processes().items() if "W" in n} == {0}


def test_what_an_operator_sets_survives_kills_of_the_planner(tmp_path: Path):
    """Killed again and again, whatever it is about to do, it ends with exactly these numbers."""
    with planned(tmp_path, "--Graph.lease-ttl-s=10") as graph:
        assert run("planner", "pause", *graph.place).returncode == 0
        for restarts, (prefill, decode) in enumerate([(3, 3), (1, 2)]):
            set_ = run("planner", "set", f"{P}={prefill}", f"{D}={decode}", *graph.place)
            assert set_.returncode == 0, set_.stderr
            for kill in range(3):
                number = restarts * 3 + kill
                entry = graph.graph.when(
                    "Planner-0",
                    lambda p, n=number: p["state"] == "ready" and p["restarts"] == n,
                )
                os.kill(entry["pid"], signal.SIGKILL)
            graph.until(prefill, decode)
            graph.until_quiet()
            started = [n for n in graph.graph.processes() if n.startswith((P, D))]
            assert len(started) == 6, "no more were ever started than the operator has set"


def test_of_two_planners_one_acts_and_the_other_takes_over(tmp_path: Path):
    with planned(tmp_path, "--Planner.ServiceArgs.workers=2") as graph:

        def led() -> dict[str, Any] | None:
            """A planner is ready before one is elected."""
            status = graph.status()
            leads = [p["lease"] for p in status["planners"] if p["leads"]]
            return status if leads == [status["leader"]] else None

        status = eventually(led, "one leads, and says so")
        leader = status["leader"]
        assert len(status["planners"]) == 2
        assert run("planner", "set", f"{D}=2", *graph.place).returncode == 0
        graph.until(1, 2)
        entry = next(p for p in graph.graph.processes().values() if p["lease"] == leader)
        os.kill(entry["pid"], signal.SIGKILL)
        eventually(lambda: graph.status()["leader"] not in (leader, None), "another one leads")
        assert run("planner", "set", f"{D}=3", *graph.place).returncode == 0
        graph.until(1, 3)


def test_a_worker_that_cannot_be_started_is_given_up_and_tried_later(tmp_path: Path):
    with planned(tmp_path) as graph:
        graph.fail_if.touch()
        graph.load(tokens_per_s=2000, jobs=2)
        graph.says("starts have failed")
        assert graph.ready() == (1, 1)


def test_what_the_commands_show_and_refuse(tmp_path: Path):
    with planned(tmp_path) as graph:
        refused = run("planner", "set", f"{D}=6", *graph.place)
        assert refused.returncode == 2
        assert "7 devices together, and budget-devices is 6" in refused.stderr
        refused = run("config", "set", "Planner.decode-min=9", *graph.place)
        assert refused.returncode == 2
        assert "decode-min is 9 and decode-max is 8" in refused.stderr
        assert run("planner", "pause", "--reason", "an upgrade", *graph.place).returncode == 0
        graph.says("hold: paused: an upgrade")
        assert run("planner", "resume", *graph.place).stdout == "resumed\n"


def test_only_who_has_the_secret_gives_the_planner_orders(tmp_path: Path):
    with planned(tmp_path) as graph:
        state = read_run(graph.graph.state_dir)
        assert state is not None and state.secret
        etcd_url, namespace = state.etcd, state.namespace
        stranger = ("--etcd-url", etcd_url, "--namespace", namespace)
        stranger += ("--state-dir", str(tmp_path / "another"))
        option = "Planner.cooldown-s"

        url = graph.graph.processes()["Planner-0"]["status_url"]

        def uses(values: dict[str, float]) -> None:
            def in_use() -> dict[str, float]:
                return httpx.get(f"{url}/health", timeout=10).json()["options"]["set"]

            eventually(lambda: in_use() == values, str(values))

        assert run("config", "set", f"{option}=2", *graph.place).returncode == 0
        uses({"cooldown-s": 2})
        for command in (
            ("config", "set", f"{option}=3"),
            ("planner", "set", f"{D}=2"),
            ("planner", "unset"),
            ("planner", "pause"),
        ):
            refused = run(*command, *stranger)
            assert refused.returncode == 1 and "this graph has a secret" in refused.stderr
        forged = encode_json(LiveOptionsRecord(values={"cooldown-s": 0.5}, version=1 << 60))

        async def forge() -> None:
            async with EtcdStore(etcd_url) as store:
                await store.put(names.live_options_key(namespace, "Planner"), forged)

        asyncio.run(forge())
        refusals = 'dynamo_lite_dropped_messages_total{where="unauthentic"} 1.0'
        eventually(lambda: refusals in httpx.get(f"{url}/metrics", timeout=10).text, refusals)
        refused = run("config", "get", *graph.place)
        assert refused.returncode == 1 and "not authentic" in refused.stderr
        uses({"cooldown-s": 2})
        assert run("config", "unset", "Planner", *graph.place).returncode == 0
        uses({})


def test_without_a_planner_the_command_says_so(etcd_url: str, namespace: str, tmp_path: Path):
    place = ("--etcd-url", etcd_url, "--namespace", namespace, "--state-dir", str(tmp_path))
    found = run("planner", "status", *place)
    assert (found.returncode, found.stdout) == (1, "no planner runs\n")
    refused = run("planner", "set", f"{D}=2", *place)
    assert refused.returncode == 1
    assert "no planner runs" in refused.stderr


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--Planner.prefill-min=9", "prefill-min is 9 and prefill-max is 8"),
        ("--Planner.kubernetes.prefill=deployments/p", "kubernetes.decode is ''"),
        (f"--{P}.ServiceArgs.workers=8", f"need 9 devices: {P} 8 * 1, {D} 1 * 1"),
    ],
)
@pytest.mark.parametrize("dry", [True, False])
def test_options_that_contradict_each_other_are_refused(
    dry: bool, option: str, said: str, tmp_path: Path
):
    """Nothing is started: the state directory stays empty."""
    state, flags = tmp_path / "state", ["--dry-run"] if dry else []
    refused = run("serve", GRAPH, *flags, option, "--state-dir", str(state))
    assert refused.returncode == 2
    assert said in refused.stderr
    assert not state.exists()
