"""The messages that vLLM carries between the parts of the connector, in vLLM's wrapper types."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorMetadata
from vllm.v1.kv_cache_interface import KVCacheConfig

from dynamo_lite.disagg.engine_config import EngineConfig
from dynamo_lite.disagg.messages import DecodeStep, PrefillStep, WorkerReport
from dynamo_lite.protocol.records import EngineMetadata, RankMetadata
from dynamo_lite.vllm.engine.kv_groups import groups_print

#: The connector's name for vLLM.
CONNECTOR = "DynamoLiteConnector"
#: The fingerprint entries that come from the engine's ranks; the component adds all others.
KV_LAYOUT, KV_GROUPS = "kv_layout", "kv_groups"


@dataclass
class StepMetadata(KVConnectorMetadata):
    """From the scheduler half to the worker halves, each step."""

    step: DecodeStep | PrefillStep


def step_of(metadata: KVConnectorMetadata | None) -> DecodeStep | PrefillStep | None:
    """Ours in a step's metadata, which may have another connector's beside it."""
    if isinstance(metadata, MultiKVConnectorMetadata):
        metadata = metadata.metadata[0]
    return metadata.step if isinstance(metadata, StepMetadata) else None


@dataclass
class ReportMetadata(KVConnectorWorkerMetadata):
    """From the worker halves to the scheduler half."""

    report: WorkerReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "ReportMetadata":
        assert isinstance(other, ReportMetadata)
        return ReportMetadata(self.report.joined(other.report))


@dataclass
class RankHandshake(KVConnectorHandshakeMetadata):
    """From each rank to the scheduler half, once."""

    #: The rank's `RankMetadata` in msgpack.
    rank: bytes
    #: Those of its layers' blocks, see `kv_memory.py`.
    layouts: frozenset[str]


def engine_metadata(
    config: EngineConfig,
    block_size_tokens: int,
    kv_config: KVCacheConfig,
    handshakes: Sequence[KVConnectorHandshakeMetadata],
) -> EngineMetadata:
    """The engine's metadata from its ranks' handshakes; its fingerprint has only KV_LAYOUT and
    KV_GROUPS.

    handshakes: in the order of `kv_memory.rank_index`.
    """
    shakes = [shake for shake in handshakes if isinstance(shake, RankHandshake)]
    layouts = {layout for shake in shakes for layout in shake.layouts}
    return EngineMetadata(
        engine_id=config.engine_id,
        lease_id=config.lease_id,
        fingerprint={
            KV_LAYOUT: " and ".join(sorted(layouts)),
            KV_GROUPS: groups_print(kv_config),
        },
        block_size_tokens=block_size_tokens,
        num_blocks=kv_config.num_blocks,
        ranks=tuple(msgspec.msgpack.decode(s.rank, type=RankMetadata) for s in shakes),
    )


class ConnectorStats(KVConnectorStats):
    """The counts of the connector halves, on vLLM's own path to the component.

    data: name -> number, or list of numbers (see `Counters`).
    """

    def reset(self) -> None:
        self.data = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> "ConnectorStats":
        merged: dict[str, Any] = dict(self.data)
        for name, value in other.data.items():
            merged[name] = merged[name] + value if name in merged else value
        return ConnectorStats(data=merged)

    def reduce(self) -> dict[str, int | float]:
        return {k: len(v) if isinstance(v, list) else v for k, v in self.data.items()}
