"""Pods are ended as Kubernetes ends them, under load: no request fails."""

import asyncio
import signal
from pathlib import Path

import aiohttp
import pytest

from tests.process.pods import Cluster, Pod, cluster

pytestmark = pytest.mark.heavy

FRONTEND = "tests.process.null_graph:Frontend"
WORKER = "tests.process.null_graph:Worker"
CLIENTS = 6
#: 60 tokens take 6 s, and an hour.
SLOW, ENDLESS = "--VllmWorker.step-s=0.1", "--VllmWorker.step-s=60"


async def frontend(pods: Cluster) -> Pod:
    return await pods.start(FRONTEND, "Frontend", "-f", "configs/agg.yaml", "--Frontend.port=0")


async def worker(pods: Cluster, *options: str) -> Pod:
    pod = await pods.start(WORKER, "VllmWorker", *options)
    await pod.wait_line("ready VllmWorker-0")
    return pod


@pytest.mark.timeout(500)
async def test_no_request_fails_while_every_pod_is_replaced(
    nats_url: str, etcd_url: str, namespace: str, tmp_path: Path
) -> None:
    servers = ("--nats-url", nats_url, "--etcd-url", etcd_url, "--namespace", namespace)
    async with cluster(servers, tmp_path) as pods, aiohttp.ClientSession() as session:
        # The second Frontend finds vLLM's verdict on the arguments.
        frontends = [await frontend(pods), await frontend(pods)]
        first = await worker(pods)
        for pod in frontends:
            await pods.become_endpoint(pod)
        async with asyncio.timeout(200), asyncio.TaskGroup() as tasks:
            clients = [tasks.create_task(pods.client(session, n)) for n in range(CLIENTS)]
            await pods.more_answers(CLIENTS)

            # A rolling update: the new worker first, then the old one drains.
            second = await worker(pods, ENDLESS)
            assert await pods.terminate(first, pre_stop_s=0, grace_period_s=60) == 0
            assert await pods.moved(session) == 0

            # A worker whose drain takes longer than its pod's grace period is killed, and its
            # requests go on elsewhere. It was the only one: it has those of all clients.
            await worker(pods, SLOW)
            assert await second.killed_while_it_drains() == -signal.SIGKILL
            await pods.more_answers(2 * CLIENTS)
            assert await pods.moved(session) > 0

            # A Frontend finishes its streams; its hook keeps it serving until no client sends
            # requests.
            assert await pods.terminate(frontends[0], pre_stop_s=1, grace_period_s=60) == 0
            await pods.more_answers(CLIENTS)
            for client in clients:
                client.cancel()
