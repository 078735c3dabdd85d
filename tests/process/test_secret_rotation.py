"""The secret of a running graph is replaced under load, as docs/operating.md says: nothing fails.

Every node has a file of its own. The decode engine of the prefill jobs is the test's.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest

from dynamo_lite.disagg.queue.base import QueueConfig
from dynamo_lite.disagg.queue.jetstream import open_queue
from dynamo_lite.protocol.codec import encode_sealed
from dynamo_lite.runtime.tasks import running
from tests.builders import eventually, graph_secret, prefill_job
from tests.process.command import VLLM_PATIENCE_S, run
from tests.process.null_decode import ENGINE, PUSH_TIMEOUT_S, decode_engine
from tests.process.pods import Cluster, Pod, cluster
from tests.process.prefill_load import Jobs

pytestmark = pytest.mark.heavy

BACKS = "tests.process.rights_graph:Backs"
FRONT = "tests.process.rights_graph:Front"
SERVICES = ("Router", "PrefillWorker", "VllmWorker", "Frontend")
#: The node of the test's decode engine, and of the operator.
ENGINE_NODE = "engine"
#: Who talk to each other are in different groups: one of them has the old file for a while.
GROUPS = ((ENGINE_NODE, "Router", "VllmWorker"), ("PrefillWorker", "Frontend"))
OLD, NEW = secrets.token_bytes(32), secrets.token_bytes(32)
ROUNDS = ((OLD, NEW), (NEW, OLD), (NEW,))
#: A changed file is read within a second.
READ_S = 1.1
CLIENTS = 3
SLOW_PUSH = QueueConfig(push_timeout_s=PUSH_TIMEOUT_S)
#: Who is not authentic, or not of the graph, is counted as one of these.
REFUSALS = ("unauthentic", "secret", "stream", "certificate")
_PATIENCE_S = 40.0


@dataclass
class Nodes:
    """The graph, under `load`."""

    pods: Cluster
    session: aiohttp.ClientSession
    nats_url: str
    etcd_url: str
    namespace: str
    directory: Path
    jobs: Jobs = field(default_factory=Jobs)
    services: dict[str, Pod] = field(default_factory=dict[str, Pod])

    def secret(self, node: str) -> Path:
        return self.directory / f"{node}.secret"

    async def start(self, service: str, node: str = "") -> None:
        """node: whose file it has; empty: its own."""
        graph, options = BACKS, ["--secret-file", str(self.secret(node or service))]
        if service == "Frontend":
            graph, options = FRONT, [*options, "-f", "configs/agg.yaml", "--Frontend.port=0"]
        pod = await self.pods.start(graph, service, *options)
        if service == "Frontend":
            await self.pods.become_endpoint(pod)
        else:
            await pod.wait_line(f"ready {service}-0")
        self.services[service] = pod

    async def restart(self, service: str) -> None:
        """The new one comes first. It has what is in the file. What the old one has refused is
        looked at while both run."""
        old = self.services[service]
        await self.start(service)
        await self.no_refusal_by(service)
        assert await self.pods.terminate(old, pre_stop_s=0, grace_period_s=30) == 0

    async def change(self, group: tuple[str, ...], *keys: bytes) -> None:
        """The files of these nodes. A decode worker is also restarted: its connections are new."""
        for node in group:
            graph_secret(self.secret(node), *keys)
        if "VllmWorker" in group:
            await self.restart("VllmWorker")
        await asyncio.sleep(READ_S)
        await self.go_on()

    async def go_on(self) -> None:
        """Requests and jobs are begun and answered, and everybody is heard."""
        before = set(self.jobs.ended)
        await self.pods.more_answers(CLIENTS)
        await eventually(lambda: self.jobs.ended.keys() - before, _PATIENCE_S)
        assert self.jobs.outcomes() == {"written"}

    async def nobody_is_refused(self) -> None:
        assert await self.pods.moved(self.session) == 0
        for service in SERVICES:
            await self.no_refusal_by(service)

    async def no_refusal_by(self, service: str) -> None:
        for where in REFUSALS:
            assert await self.refused(service, where) == 0, (service, where)

    async def refused(self, service: str, where: str) -> float:
        start = f'dynamo_lite_dropped_messages_total{{where="{where}"}}'
        return await self.pods.count(self.session, start, service)

    async def counted(self, service: str, where: str) -> None:
        """Returns when this service has refused somebody."""

        async def has() -> bool:
            return await self.refused(service, where) > 0

        await eventually(has, _PATIENCE_S)

    async def operator(self, *command: str) -> str:
        etcd = ("--etcd-url", self.etcd_url, "--namespace", self.namespace)
        secret = ("--secret-file", str(self.secret(ENGINE_NODE)))
        done = await asyncio.to_thread(run, *command, *etcd, *secret)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    @asynccontextmanager
    async def load(self) -> AsyncIterator[None]:
        """Answers are right, or the context ends with an error."""
        decode = decode_engine(
            nats_url=self.nats_url,
            etcd_url=self.etcd_url,
            namespace=self.namespace,
            secret=self.secret(ENGINE_NODE),
            done=self.jobs.done,
            holders=self.jobs.holders,
        )
        async with AsyncExitStack() as stack:
            queue = await stack.enter_async_context(decode)
            await stack.enter_async_context(running(self.jobs.listen(), name="listen"))
            await stack.enter_async_context(running(self.jobs.load(queue), name="load"))
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            clients = [
                tasks.create_task(self.pods.client(self.session, number))
                for number in range(CLIENTS)
            ]
            yield
            for client in clients:
                client.cancel()


@pytest.fixture
async def nodes(
    nats_url: str, etcd_url: str, namespace: str, tmp_path: Path
) -> AsyncIterator[Nodes]:
    servers = ("--nats-url", nats_url, "--etcd-url", etcd_url, "--namespace", namespace)
    async with cluster(servers, tmp_path) as pods, aiohttp.ClientSession() as session:
        made = Nodes(pods, session, nats_url, etcd_url, namespace, tmp_path)
        for node in (*SERVICES, ENGINE_NODE):
            graph_secret(made.secret(node), OLD)
        await asyncio.gather(*map(made.start, SERVICES))
        yield made


@pytest.mark.timeout(5 * VLLM_PATIENCE_S)
async def test_the_secret_of_a_running_graph_is_replaced_without_a_failed_request(nodes: Nodes):
    await nodes.operator("config", "set", "Router.kv-router.kv-weight=0.5")
    async with nodes.load():
        await nodes.go_on()
        for keys in ROUNDS:
            if OLD not in keys:
                await _before_the_last_round(nodes)
            for group in GROUPS:
                await nodes.change(group, *keys)
            await nodes.nobody_is_refused()
        # A new process finds the options, which are sealed with the new key.
        await nodes.restart("Router")
        await nodes.nobody_is_refused()
        said = await nodes.operator("config", "get")
        assert "0.5" in said and "authentic" not in said, said
        await _the_old_key_opens_nothing(nodes)
        await nodes.go_on()


async def _before_the_last_round(nodes: Nodes) -> None:
    """No job that was queued under the old key is left, and no record has its seal."""
    before = set(nodes.jobs.pushed)
    await eventually(lambda: not before & nodes.jobs.open, _PATIENCE_S)
    await nodes.operator("config", "set", "Router.kv-router.kv-weight=0.5")


async def _the_old_key_opens_nothing(nodes: Nodes) -> None:
    """A worker that has only the old key is not heard and gets no connection; a client's job is
    dropped."""
    graph_secret(late := nodes.secret("late"), OLD)
    await nodes.start("VllmWorker", "late")
    await nodes.counted("Frontend", "unauthentic")
    await nodes.counted("VllmWorker", "stream")
    async with open_queue(nodes.nats_url, nodes.namespace, SLOW_PUSH, str(late)) as queue:
        job = prefill_job("late", engine_id=ENGINE)
        await queue.push(encode_sealed(job), message_id="late")
    await nodes.counted("PrefillWorker", "unauthentic")
    assert "late" not in nodes.jobs.ended.keys() | nodes.jobs.holders.keys()
