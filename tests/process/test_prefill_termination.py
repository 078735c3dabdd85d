"""Pods of prefill workers are ended as Kubernetes ends them, under load: no remote prefill fails.

The decode engine is the test's: it pushes jobs and holds claims.
"""

import signal
from pathlib import Path

import pytest

from dynamo_lite.disagg.queue.base import QueueConfig
from dynamo_lite.runtime.tasks import running
from tests.builders import eventually
from tests.process.command import VLLM_PATIENCE_S
from tests.process.null_decode import PUSH_TIMEOUT_S, decode_engine
from tests.process.pods import Cluster, Pod, cluster
from tests.process.prefill_load import Jobs

pytestmark = pytest.mark.heavy

GRAPH = "tests.process.rights_graph:Backs"
LEASE_TTL_S = 10.0
WRITE_S = 12.0
"""Longer than the lease, and than a claim holds (3 s): a worker that leaves has to renew it."""
SHORT_GRACE_S = 4.0
"""Enough to begin to drain, and not enough for a job."""
SLOW = (f"--Graph.lease-ttl-s={LEASE_TTL_S}", f"--PrefillWorker.write-s={WRITE_S}")
_PATIENCE_S = 40.0


async def prefill_worker(pods: Cluster, *options: str) -> Pod:
    pod = await pods.start(GRAPH, "PrefillWorker", *options)
    await pod.wait_line("ready PrefillWorker-0")
    return pod


@pytest.mark.timeout(3 * VLLM_PATIENCE_S + 300)
async def test_no_remote_prefill_fails_while_prefill_workers_are_replaced(
    nats_url: str, etcd_url: str, namespace: str, tmp_path: Path
) -> None:
    servers = ("--nats-url", nats_url, "--etcd-url", etcd_url, "--namespace", namespace)
    jobs = Jobs()
    decode = decode_engine(
        nats_url=nats_url,
        etcd_url=etcd_url,
        namespace=namespace,
        done=jobs.done,
        config=QueueConfig(push_timeout_s=PUSH_TIMEOUT_S),
        holders=jobs.holders,
        renewed=jobs.renewed,
    )
    async with (
        cluster(servers, tmp_path) as pods,
        decode as queue,
        running(jobs.listen(), name="listen"),
    ):
        old_pod = await prefill_worker(pods, *SLOW)
        async with running(jobs.load(queue), name="load"):
            # A rolling update: the new worker first, then the old one drains. It finishes what it
            # has claimed, and no other worker does.
            old = await jobs.new_writer()
            new_pod = await prefill_worker(pods, *SLOW)
            new = await jobs.new_writer(old)
            claimed = await jobs.fresh(old)
            assert await pods.terminate(old_pod, pre_stop_s=0, grace_period_s=60) == 0
            assert all(jobs.ended[attempt] == [(old, "written")] for attempt in claimed)
            assert not jobs.of(old)
            assert {(attempt, old) for attempt in claimed} <= jobs.renewed

            # A worker whose drain takes longer than its pod's grace period is killed. No worker
            # gets its jobs; another one goes on with those that follow.
            await prefill_worker(pods)
            begun = await jobs.fresh(new)
            code = await pods.terminate(new_pod, pre_stop_s=0, grace_period_s=SHORT_GRACE_S)
            assert code == -signal.SIGKILL
            assert {(attempt, new) for attempt in begun} <= jobs.renewed
            lost = await jobs.lose(queue, new)
        await eventually(lambda: not jobs.open, _PATIENCE_S)

        async def answered() -> bool:
            return (await queue.depth()).jobs == 0

        await eventually(answered, _PATIENCE_S)
    # They had just begun when the worker began to leave.
    assert begun <= lost
    assert all(jobs.ended[attempt] == [(new, "lost")] for attempt in lost)
    # A worker that leaves gives back what it has pulled and not claimed.
    outcomes = {outcome for _, outcome in jobs.ends(jobs.pushed - lost)}
    assert "written" in outcomes and outcomes <= {"written", "given back"}
    assert all(len(ends) == 1 for ends in jobs.ended.values())
