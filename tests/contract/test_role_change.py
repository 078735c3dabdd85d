"""The connector changes its role on real NATS, etcd and NIXL, both halves; no model computes."""

import os
import threading
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from dynamo_lite.disagg.decode.scheduler import DecodeScheduler
from dynamo_lite.disagg.engine_config import (
    DecodeEngineConfig,
    EngineConfig,
    PrefillEngineConfig,
    write_engine_config,
)
from dynamo_lite.disagg.prefill.scheduler import PrefillScheduler
from dynamo_lite.protocol import names
from dynamo_lite.protocol.errors import NoResponders, StartupError
from dynamo_lite.protocol.options import DisaggOptions
from dynamo_lite.protocol.prefill import decode_engine_status
from dynamo_lite.queue.base import QueueConfig
from dynamo_lite.runtime.fence import FenceHolder
from dynamo_lite.runtime.messaging import Messaging
from dynamo_lite.runtime.nats.open import open_messaging
from dynamo_lite.vllm.engine import connector, kv_memory
from dynamo_lite.vllm.engine.connector import DynamoLiteConnector
from dynamo_lite.vllm.engine.engine_config import vllm_config
from dynamo_lite.vllm.engine.running_core import RunningCore
from tests.vllm.front_half import write_model

BLOCKS, BLOCK, HEADS, WIDTH = 8, 32, 2, 64
CHANGES = 20
#: Files and threads come and go with sessions; a leak of one in each change would be 20.
SLACK = 6


class Engine:
    """The connector's halves in this process. `is_sleeping_async` makes a step, as vLLM's idle
    engine does."""

    def __init__(self, folder: Path, model: Path, config: EngineConfig):
        file = folder / "first.engine.json"
        write_engine_config(file, config)
        flags = [f"--model={model}", "--kv-cache-memory-bytes=1048576", f"--block-size={BLOCK}"]
        self.config = vllm_config(flags, config, file)
        spec = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=HEADS, head_size=WIDTH, dtype=torch.float32
        )
        kv_config = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["0"], spec)])
        self.kv = torch.rand((BLOCKS, HEADS, BLOCK, 2 * WIDTH))
        self.rank = DynamoLiteConnector(self.config, KVConnectorRole.WORKER, kv_config)
        self.rank.register_kv_caches({"0": self.kv})
        self.scheduler = DynamoLiteConnector(self.config, KVConnectorRole.SCHEDULER, kv_config)
        self.pool = BlockPool(BLOCKS, enable_caching=True, hash_block_size=BLOCK)
        manager: Any = SimpleNamespace(
            block_pool=self.pool,
            cache_blocks=None,
            watermark_blocks=0,
            get_block_ids=lambda _: [[]],
        )
        self.scheduler.bind_kv_cache_manager(manager)
        shake = self.rank.get_handshake_metadata()
        assert shake is not None
        self.scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): shake})
        self.core = RunningCore([])
        self.core.client, self.core.engine_config = self, config

    async def is_sleeping_async(self) -> bool:
        if self.scheduler.has_pending_push_work():
            self.step()
        return False

    def step(self) -> None:
        nothing = SimpleNamespace(req_ids=[], num_computed_tokens=[])
        output = SimpleNamespace(
            num_scheduled_tokens={},
            total_num_scheduled_tokens=0,
            scheduled_new_reqs=[],
            scheduled_cached_reqs=nothing,
            scheduled_spec_decode_tokens={},
            preempted_req_ids=None,
        )
        self.rank.bind_connector_metadata(self.scheduler.build_connector_meta(output))
        self.rank.wait_for_save()
        results = self.rank.get_transfer_results(set())
        report = self.rank.build_connector_worker_meta()
        self.rank.clear_connector_metadata()
        ended = (results.failed_recving, results.finished_recving, results.finished_sending)
        if report is not None or any(ended):
            made = SimpleNamespace(
                failed_recving=ended[0],
                finished_recving=ended[1],
                finished_sending=ended[2],
                kv_connector_worker_meta=report,
            )
            self.scheduler.update_connector_output(made)

    def close(self) -> None:
        self.scheduler.shutdown()
        self.rank.shutdown()


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_memory, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(kv_memory, "get_pp_group", lambda: SimpleNamespace(rank_in_group=0))
    monkeypatch.setattr(connector, "_die_with_parent", lambda: None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def client(nats_url: str) -> AsyncIterator[Messaging]:
    async with open_messaging(nats_url, None) as messaging:
        yield messaging


class Roles:
    """Configs of both roles, each time with a new engine id and a new lease."""

    def __init__(self, folder: Path, namespace: str, nats_url: str, etcd_url: str):
        self.folder, self._fence = folder, FenceHolder(folder / "fence")
        self._lease = 0
        self._base = EngineConfig(
            namespace=namespace,
            engine_id="",
            lease_id=1,
            lease_ttl_s=20.0,
            nats_url=nats_url,
            etcd_url=etcd_url,
            role=DecodeEngineConfig(
                options=DisaggOptions(), prefill_component="PrefillWorker", queue=QueueConfig()
            ),
            switchable=True,
        )

    def decode(self, **changes: Any) -> EngineConfig:
        self._lease += 1
        ids = {"engine_id": str(uuid.uuid4()), "lease_id": self._lease}
        return msgspec.structs.replace(self._base, **{**ids, **changes})

    def prefill(self, **changes: Any) -> EngineConfig:
        role = PrefillEngineConfig(
            fence_path=str(self._fence.path), min_prefix_read_length=128, queue=QueueConfig()
        )
        return self.decode(role=role, **changes)

    def file(self, config: EngineConfig) -> Path:
        return self.folder / f"{config.engine_id}.engine.json"

    def close(self) -> None:
        self._fence.close()


@pytest.fixture
def roles(tmp_path: Path, namespace: str, nats_url: str, etcd_url: str) -> Iterator[Roles]:
    made = Roles(tmp_path, namespace, nats_url, etcd_url)
    yield made
    made.close()


@pytest.fixture
def engine(tmp_path: Path, model: Path, roles: Roles) -> Iterator[Engine]:
    made = Engine(tmp_path, model, roles.decode())
    yield made
    made.close()


def resources() -> tuple[int, int]:
    """Open files and threads of this process."""
    return len(os.listdir("/proc/self/fd")), threading.active_count()


async def test_an_engine_is_of_one_role_after_the_other_on_the_same_memory(
    engine: Engine, roles: Roles, client: Messaging
):
    before, agents, sizes, took = engine.kv.clone(), set[bytes](), list[tuple[int, int]](), []
    for number in range(CHANGES):
        old = engine.core.engine_config
        assert old is not None
        new = roles.prefill() if number % 2 == 0 else roles.decode()
        await engine.core.change_role(new, roles.file(new), client)
        kind = PrefillScheduler if number % 2 == 0 else DecodeScheduler
        assert isinstance(engine.scheduler._scheduler, kind)
        reply = await client.request(
            names.describe_subject(new.namespace, new.engine_id), b"", timeout_s=5.0
        )
        told = decode_engine_status(reply).metadata
        assert (told.engine_id, told.lease_id) == (new.engine_id, new.lease_id)
        assert told.num_blocks == BLOCKS
        (rank,) = told.ranks
        assert {region.base for region in rank.regions} == {engine.kv.data_ptr()}
        agents.add(rank.agent)
        # Nothing that is addressed to the old engine id arrives anywhere.
        for subject in (names.describe_subject, names.claim_subject, names.role_subject):
            with pytest.raises(NoResponders):
                await client.request(subject(old.namespace, old.engine_id), b"", timeout_s=5.0)
        assert engine.core.change_s is not None
        took.append(engine.core.change_s)
        sizes.append(resources())
    assert len(agents) == CHANGES
    assert torch.equal(engine.kv, before)
    print("seconds per change", [round(one, 3) for one in took])
    assert sizes[-1][0] - sizes[1][0] <= SLACK, sizes
    assert sizes[-1][1] - sizes[1][1] <= SLACK, sizes


async def test_an_engine_with_blocks_in_use_keeps_its_role(
    engine: Engine, roles: Roles, client: Messaging
):
    held = engine.pool.get_new_blocks(2)
    old, new = engine.core.engine_config, roles.prefill(lease_ttl_s=1.0)
    assert old is not None
    with pytest.raises(StartupError, match=r"within 2.5 s: 2 blocks of its KV are in use"):
        await engine.core.change_role(new, roles.file(new), client, margin_s=0.5)
    assert isinstance(engine.scheduler._scheduler, DecodeScheduler)
    subject = names.describe_subject(old.namespace, old.engine_id)
    reply = await client.request(subject, b"", timeout_s=5.0)
    assert decode_engine_status(reply).metadata.engine_id == old.engine_id
    engine.pool.free_blocks(held)
    await engine.core.change_role(new, roles.file(new), client)
    assert isinstance(engine.scheduler._scheduler, PrefillScheduler)
