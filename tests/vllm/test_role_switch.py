"""Workers that change their role and keep their engine: under load, there and back."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from dynamo_lite.protocol import names
from dynamo_lite.protocol.errors import NoResponders
from dynamo_lite.protocol.planner import Counts, SwitchState
from dynamo_lite.protocol.records import decode_engine
from dynamo_lite.runtime.etcd.store import EtcdStore
from dynamo_lite.runtime.supervisor_client import SupervisorClient
from dynamo_lite.serve.run_state import ProcessState
from tests.vllm.conftest import Stage
from tests.vllm.graph import NAMESPACE, PAIR_OPTIONS, Graph, PlainServer, sample_sum
from tests.vllm.test_membership import load, under_load

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(450)]

D, P = "VllmWorker", "PrefillWorker"
OPTIONS = (*PAIR_OPTIONS, *(f"--{name}.switchable=true" for name in (D, P)))
#: What the engine's process may have grown by in two more changes of its role, in MiB. An engine's
#: KV and weights are 150.
GROWTH_MIB = 30.0


async def switched(graph: Graph, giver: str, taker: str, lease: str) -> SwitchState:
    """`dynamo-lite switch GIVER TAKER LEASE`; how the supervisor says that it has ended."""
    command = [sys.executable, "-m", "dynamo_lite.cli.cli", "switch", giver, taker, lease]
    done = await asyncio.to_thread(
        subprocess.run,
        [*command, "--state-dir", str(graph.directory)],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr + graph.tails()
    async with SupervisorClient(graph.state_dir) as supervisor:
        return (await supervisor.order(Counts())).switches[-1]


async def engine_ids(graph: Graph) -> dict[str, str]:
    """Of the decode engines, by lease."""
    async with EtcdStore(graph.etcd_url) as store:
        found = await store.get_prefix(names.nixl_metadata_prefix(NAMESPACE))
    engines = map(decode_engine, found.values())
    return {f"{engine.lease_id:x}": engine.engine_id for engine in engines}


def of_pid(graph: Graph, pid: int) -> ProcessState:
    return next(p for p in graph.processes() if p.pid == pid and p.state == "ready")


def mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024


async def test_a_decode_worker_prefills_and_decodes_again_with_the_same_engine(
    stage: Stage, reference: PlainServer
):
    with stage.alone(options=OPTIONS) as graph:
        old = await engine_ids(graph)
        worker = graph.process(D, 1)
        pid, lease, engine = worker.pid, worker.lease, graph.engine_pid(D, 1)
        async with under_load(graph, reference, load(seed=900, count=60, tokens=100)):
            there = await switched(graph, D, P, lease)
        assert (there.level, there.not_kept) == (2, ""), there
        now = of_pid(graph, pid)
        assert (now.service, graph.engine_pid(P, now.instance)) == (P, engine)
        assert now.lease not in (lease, "")
        # The old role is gone: nothing can be asked of it, granted by it or written for it.
        assert lease not in await engine_ids(graph)
        async with graph.messaging() as messaging:
            for subject in (names.claim_subject, names.role_subject, names.describe_subject):
                with pytest.raises(NoResponders):
                    await messaging.request(subject(NAMESPACE, old[lease]), b"", timeout_s=5)
        async with under_load(graph, reference, load(seed=901, count=60, tokens=40)):
            pass
        # A switch that did nothing would be quick and right: this is evidence that it prefills.
        assert sample_sum(now.status_url, "dynamo_lite_prefill_jobs_total") > 0
        sizes = [mib(engine)]
        for giver, taker in ((P, D), (D, P), (P, D)):
            async with under_load(graph, reference, load(seed=902, count=40, tokens=60)):
                state = await switched(graph, giver, taker, of_pid(graph, pid).lease)
            assert (state.level, state.not_kept) == (2, ""), state
            assert of_pid(graph, pid).service == taker
            sizes.append(mib(engine))
        assert len(await engine_ids(graph)) == 2
        assert old[lease] not in (await engine_ids(graph)).values()
        await graph.settled()
        assert sizes[-1] - sizes[1] < GROWTH_MIB, sizes
        assert not graph.errors()
