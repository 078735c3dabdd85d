"""Pods as Kubernetes ends them, and clients that stream from those that are endpoints."""

import asyncio
import itertools
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from tests.process.command import VLLM_PATIENCE_S, Serving, descendants_of, serving
from tests.process.null_graph import answer

TOKENS = 60
#: For some answers, each of which takes 6 s at most.
_ANSWERS_S = 60.0


@dataclass
class Pod:
    """One service that was started alone: what a container of it runs."""

    command: Serving
    url: str = ""

    async def wait_line(self, text: str) -> str:
        return await asyncio.to_thread(self.command.wait_line, text, VLLM_PATIENCE_S)

    def sigkill(self) -> None:
        """To all processes of the container at once."""
        for pid in (self.command.process.pid, *descendants_of(self.command.process.pid)):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    async def ended(self) -> int:
        return await asyncio.to_thread(self.command.end)

    async def killed_while_it_drains(self) -> int:
        """SIGTERM, and a grace period that ends as soon as the drain has begun. Returns the exit
        code."""

        def kill() -> int:
            self.command.signal(signal.SIGTERM)
            self.command.wait_line("draining: ")
            self.sigkill()
            return self.command.end()

        return await asyncio.to_thread(kill)


@dataclass
class Cluster:
    """The pods of one namespace, and the Service in front of its Frontends."""

    servers: tuple[str, ...]
    state_dir: Path
    stack: AsyncExitStack
    #: URLs of the Frontends that get new requests.
    endpoints: list[str] = field(default_factory=list[str])
    answers: int = 0

    async def start(self, graph: str, service: str, *options: str) -> Pod:
        """Returns when its command has begun to start processes."""
        arguments = (*self.servers, "--service-name", service, *options)
        command = self.stack.enter_context(serving(self.state_dir, *arguments, graph=graph))
        pod = Pod(command)
        await pod.wait_line("NATS nats://")
        return pod

    async def become_endpoint(self, pod: Pod) -> None:
        pod.url = (await pod.wait_line("ready http")).split()[1]
        self.endpoints.append(pod.url)

    async def terminate(self, pod: Pod, *, pre_stop_s: float, grace_period_s: float) -> int:
        """What the kubelet and the endpoints' controller do. Returns the exit code; -9 after the
        grace period, which begins before the preStop hook.

        https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/#pod-termination-flow
        """
        assert grace_period_s > pre_stop_s, "it would be killed without a SIGTERM"
        try:
            async with asyncio.timeout(grace_period_s):
                if pod.url:
                    self.endpoints.remove(pod.url)
                await asyncio.sleep(pre_stop_s)
                pod.command.signal(signal.SIGTERM)
                return await pod.ended()
        except TimeoutError:
            pod.sigkill()
            return await pod.ended()

    async def client(self, session: aiohttp.ClientSession, number: int) -> None:
        """Streams one answer after another, each on a connection of its own, until cancelled."""
        for turn in itertools.count(number):
            url = self.endpoints[turn % len(self.endpoints)]
            body = {
                **{"model": "tiny", "prompt": f"client {number}", "max_tokens": TOKENS},
                **{"temperature": 0, "stream": True},
            }
            headers = {"connection": "close"}
            async with session.post(f"{url}/v1/completions", json=body, headers=headers) as reply:
                assert reply.status == 200, await reply.text()
                events = (await reply.text()).strip().split("\n\n")
            assert events[-1] == "data: [DONE]", events[-1]
            parts = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
            assert all("choices" in part for part in parts), parts[-1]
            text = "".join(part["choices"][0]["text"] for part in parts)
            assert text == answer(TOKENS)
            assert parts[-1]["choices"][0]["finish_reason"] == "length"
            self.answers += 1

    async def moved(self, session: aiohttp.ClientSession) -> float:
        """How many requests the Frontends, all of which run, have moved to another worker."""
        total = 0.0
        for run in self.state_dir.glob("lone/Frontend-*/run.json"):
            [process] = json.loads(run.read_text())["processes"]
            async with session.get(f"{process['status_url']}/metrics") as reply:
                for line in (await reply.text()).splitlines():
                    if line.startswith("dynamo_lite_requests_moved_total{"):
                        total += float(line.rpartition(" ")[2])
        return total

    async def more_answers(self, number: int) -> None:
        """Returns after this many more answers. Raises TimeoutError."""
        wanted = self.answers + number
        async with asyncio.timeout(_ANSWERS_S):
            while self.answers < wanted:
                await asyncio.sleep(0.02)


@asynccontextmanager
async def cluster(servers: tuple[str, ...], state_dir: Path) -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        yield Cluster(servers, state_dir, stack)
