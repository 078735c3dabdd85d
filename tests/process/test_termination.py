"""Pods are ended as Kubernetes ends them, under load: no request fails.

https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/#pod-termination-flow
"""

import asyncio
import signal
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from dynamo_lite.serve.run_state import read_run
from tests.builders import eventually
from tests.chaos.load import Load
from tests.hosts.load import told_questions
from tests.process.command import Serving, serving
from tests.started import VLLM_PATIENCE_S, descendants_of, send
from tests.vllm.graph import sample_sum

pytestmark = pytest.mark.heavy

FRONTEND, WORKER = "tests.process.roles_graph:Served", "tests.process.roles_graph:Workers"
#: Of each Frontend.
CLIENTS = 3
#: 60 tokens take 6 s, and an hour.
SLOW, ENDLESS = "--VllmWorker.step-s=0.1", "--VllmWorker.step-s=60"


async def line(pod: Serving, text: str) -> str:
    return await asyncio.to_thread(pod.wait_line, text, VLLM_PATIENCE_S)


async def killed_while_it_drains(pod: Serving) -> int:
    """SIGTERM, and a grace period that ends as soon as the drain has begun: all processes of the
    container are killed at once."""
    pod.signal(signal.SIGTERM)
    await line(pod, "draining: ")
    for pid in (pod.pid, *descendants_of(pod.pid)):
        send(pid, signal.SIGKILL)
    return await asyncio.to_thread(pod.end)


@pytest.mark.timeout(500)
async def test_no_request_fails_while_every_pod_is_replaced(
    nats_url: str, etcd_url: str, namespace: str, tmp_path: Path
) -> None:
    servers = ("--nats-url", nats_url, "--etcd-url", etcd_url, "--namespace", namespace)

    def moved() -> float:
        """How many requests the Frontends have moved to another worker."""
        runs = [read_run(path.parent) for path in tmp_path.glob("lone/Frontend-*/run.json")]
        urls = [process.status_url for run in runs if run for process in run.processes]
        return sum(sample_sum(url, "dynamo_lite_requests_moved_total") for url in urls)

    async with AsyncExitStack() as stack:

        async def start(service: str, graph: str, *options: str) -> Serving:
            arguments = (*servers, "--service-name", service, *options)
            pod = stack.enter_context(serving(tmp_path, *arguments, graph=graph))
            await line(pod, "NATS nats://")
            return pod

        async def worker(*options: str) -> Serving:
            pod = await start("VllmWorker", WORKER, *options)
            await line(pod, "ready VllmWorker-0")
            return pod

        # The second Frontend finds vLLM's verdict on the arguments.
        shared = ("-f", "configs/agg.yaml", "--Frontend.port=0")
        frontends = [await start("Frontend", FRONTEND, *shared) for _ in range(2)]
        first = await worker()
        loads: list[Load] = []
        for pod in frontends:
            port = int((await line(pod, "ready http")).split()[1].rpartition(":")[2])
            load = Load(port, *told_questions([60] * 6), clients=CLIENTS, pause_s=0.0, cancels=0.0)
            loads.append(await stack.enter_async_context(load))

        async def more_answers(count: int, *of: Load) -> None:
            """Each of these has so many more, and all are right."""
            wanted = [load.tally.right + count for load in of]
            await eventually(
                lambda: all(o.tally.right >= n for o, n in zip(of, wanted, strict=True)), 60
            )
            for load in loads:
                assert not (load.tally.wrong or load.tally.lost or load.tally.refused), load.tally

        await more_answers(CLIENTS, *loads)
        # A rolling update: the new worker first, then the old one drains.
        second = await worker(ENDLESS)
        assert await asyncio.to_thread(first.end, signal.SIGTERM) == 0
        assert moved() == 0

        # A worker whose drain takes longer than its pod's grace period is killed, and its
        # requests go on elsewhere. It was the only one: it has those of all clients.
        await worker(SLOW)
        assert await killed_while_it_drains(second) == -signal.SIGKILL
        await more_answers(CLIENTS, *loads)
        assert moved() > 0

        # A Frontend that is no endpoint any more finishes its streams.
        loads[0].stop()
        assert await asyncio.to_thread(frontends[0].end, signal.SIGTERM) == 0
        await more_answers(CLIENTS, loads[1])
        for load in loads:
            load.stop()
