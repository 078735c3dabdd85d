"""The messages that vLLM carries between the parts of the connector, in vLLM's wrapper types."""

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorMetadata

from dynamo_lite.disagg.messages import DecodeStep, PrefillStep, WorkerReport

#: The connector's name for vLLM.
CONNECTOR = "DynamoLiteConnector"


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


class ConnectorStats(KVConnectorStats):
    """The counts of the connector halves, on vLLM's own path to the component.

    data: name -> number, or list of numbers (see `Counters`).
    """

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> "ConnectorStats":
        merged: dict[str, Any] = dict(self.data)
        for name, value in other.data.items():
            merged[name] = merged[name] + value if name in merged else value
        return ConnectorStats(data=merged)
