"""Every component as a process with the rights that `dynamo-lite access` prints, and no more.

nats-server and etcd are real and know a user per component. The engines compute nothing, and there
are no remote prefills: `tests/vllm/test_access.py` has those.
"""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from dynamo_lite.serve.run_state import RunState, read_run
from tests.builders import eventually
from tests.forwarding import COMPLETION, TEXT
from tests.least_rights import LeastRights, least_rights
from tests.process.command import Serving, run, serving
from tests.process.joining import Joining
from tests.process.null_graph import is_answer
from tests.scripted import Fleet, ScriptedEngine, nixl
from tests.started import VLLM_PATIENCE_S

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(400)]

NAMESPACE = "n-1"
BACKS = "tests.process.rights_graph:Backs"
FRONT = "tests.process.rights_graph:Front"
_TOKENS = 20


@dataclass
class Rights:
    """The servers, and the services that run on them, each with its own rights."""

    servers: LeastRights
    directory: Path
    services: dict[str, Serving] = field(default_factory=dict[str, Serving])

    def options(self, component: str) -> list[str]:
        return [*self.servers.options(component), "--namespace", NAMESPACE]

    def refusals(self) -> list[str]:
        """What the servers have refused to the services so far."""
        logs = [log.read_text() for log in self.directory.glob("*-state/**/logs/*.log")]
        output = [service.output for service in self.services.values()]
        lines = [line for text in (*output, *logs) for line in text.splitlines()]
        said = ("permission denied", "permissions violation", "was not revoked")
        found = [line for line in lines if any(text in line.lower() for text in said)]
        return [*self.servers.violations(), *found]

    def operator(self, *command: str) -> str:
        """The output of a command of `dynamo-lite` with the operator's rights."""
        urls = self.servers.options("Operator")
        done = run(*command, *urls[2:], "--namespace", NAMESPACE)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def state(self, component: str) -> RunState:
        folder = self.services[component].state_dir
        state = read_run(folder) or read_run(folder / "lone" / f"{component}-0")
        assert state is not None
        return state

    def status_url(self, component: str) -> str:
        return self.state(component).processes[0].status_url

    def metric(self, component: str, start: str) -> float:
        """The sum of the samples whose lines begin so."""
        page = httpx.get(f"{self.status_url(component)}/metrics", timeout=30).text
        return sum(
            float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(start)
        )


@pytest.fixture(scope="module")
def rights(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rights]:
    """Everything but a Forwarder runs."""
    directory = tmp_path_factory.mktemp("rights")
    with least_rights(directory, NAMESPACE) as servers, ExitStack() as stack:
        made = Rights(servers, directory)

        def start(component: str, graph: str, *options: str) -> None:
            arguments = ("--service-name", component, *made.options(component), *options)
            state_dir = directory / f"{component}-state"
            service = serving(state_dir, *arguments, graph=graph)
            made.services[component] = stack.enter_context(service)

        for component in ("Router", "VllmWorker", "PrefillWorker", "Planner"):
            start(component, BACKS)
        start("Frontend", FRONT, "-f", "configs/agg.yaml", "--Frontend.port=0")
        for component, service in made.services.items():
            ready = "ready http" if component == "Frontend" else f"ready {component}-0"
            service.wait_line(ready, VLLM_PATIENCE_S)
        yield made


async def test_a_request_is_placed_by_the_router_and_answered(rights: Rights):
    seen = rights.refusals()
    url = next(
        line for line in rights.services["Frontend"].output.splitlines() if "ready http" in line
    )
    body = {"model": "tiny", "prompt": "hello", "max_tokens": _TOKENS, "temperature": 0}
    async with httpx.AsyncClient(timeout=60) as client:
        for _ in range(3):
            reply = await client.post(f"{url.split()[1]}/v1/completions", json=body)
            assert reply.status_code == 200, reply.text
            assert is_answer(reply.json()["choices"][0]["text"], _TOKENS)
    assert rights.metric("Router", "dynamo_lite_router_choices_total") == 3
    assert rights.metric("Frontend", "dynamo_lite_router_fallbacks_total") == 0
    # The Router gets the outcomes after the answers.
    health = f"{rights.status_url('Router')}/health"
    await eventually(lambda: httpx.get(health, timeout=30).json()["requests"] == 0)
    assert rights.refusals() == seen == []


async def test_the_planner_leads_and_the_operator_s_commands_work(rights: Rights):
    listed = json.loads(await asyncio.to_thread(rights.operator, "ps", "--json"))
    assert {row["component"] for row in listed} >= rights.services.keys()
    assert {row["state"] for row in listed} == {"ready"}
    shown = await asyncio.to_thread(rights.operator, "planner", "status")
    assert " leads" in shown
    await asyncio.to_thread(rights.operator, "planner", "pause")
    health = f"{rights.status_url('Planner')}/health"

    def hold() -> str:
        return httpx.get(health, timeout=30).json()["planner"]["hold"]

    await eventually(lambda: hold() == "paused")
    await asyncio.to_thread(rights.operator, "planner", "resume")
    await eventually(lambda: hold() != "paused")
    option = "Router.kv-router.kv-weight"
    await asyncio.to_thread(rights.operator, "config", "set", f"{option}=0.5")
    options = f"{rights.status_url('Router')}/health"
    await eventually(
        lambda: (
            httpx.get(options, timeout=30).json()["options"]["set"] == {"kv-router.kv-weight": 0.5}
        )
    )
    assert rights.refusals() == []


async def test_a_killed_worker_s_lease_is_revoked(rights: Rights):
    [victim] = rights.state("PrefillWorker").processes
    os.kill(victim.pid, signal.SIGKILL)

    def again() -> bool:
        [worker] = rights.state("PrefillWorker").processes
        return worker.state == "ready" and worker.pid != victim.pid

    await eventually(again, VLLM_PATIENCE_S)
    assert victim.lease not in await asyncio.to_thread(rights.operator, "ps")
    assert rights.refusals() == []


async def test_a_forwarder_sends_to_an_engine_that_has_joined(rights: Rights, tmp_path: Path):
    fleet = Fleet()
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(ScriptedEngine(fleet, "decode", nixl))
        options = rights.options("Forwarder")
        graph = "graphs.forward:Forwarder"
        with serving(tmp_path, *options, "--Forwarder.port=0", graph=graph) as forwarder:
            line = await asyncio.to_thread(forwarder.wait_line, "ready http")
            joined = rights.servers.options("DecodeEngine")[2:]
            with Joining(engine, *joined, "--namespace", NAMESPACE) as process:
                await process.joined()
                async with httpx.AsyncClient(timeout=60) as client:

                    async def usable() -> bool:
                        return (await client.get(f"{line.split()[1]}/ready")).status_code == 200

                    await eventually(usable, 30)
                    reply = await client.post(f"{line.split()[1]}/v1/completions", json=COMPLETION)
                assert reply.json()["choices"][0]["text"] == TEXT
        assert "denied" not in forwarder.output
    assert fleet.violations == []
    assert rights.refusals() == []


async def test_a_component_with_another_s_rights_does_not_start(rights: Rights, tmp_path: Path):
    options = ["--service-name", "Planner", *rights.options("Router")]

    def start() -> str:
        with serving(tmp_path, *options, graph=BACKS) as service:
            assert service.end() == 1
        return service.output + "".join(log.read_text() for log in tmp_path.glob("**/logs/*.log"))

    assert "permission denied" in await asyncio.to_thread(start)
