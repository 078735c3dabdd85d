"""Our messages in the wrappers that vLLM carries between its processes."""

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from dynamo_lite.disagg.messages import DecodeStep, PrefillStep, WorkerReport


@dataclass
class StepMetadata(KVConnectorMetadata):
    """What vLLM carries from the scheduler half to the worker halves."""

    step: DecodeStep | PrefillStep


@dataclass
class ReportMetadata(KVConnectorWorkerMetadata):
    """What vLLM carries from the worker halves to the scheduler half."""

    report: WorkerReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "ReportMetadata":
        assert isinstance(other, ReportMetadata)
        return ReportMetadata(self.report.joined(other.report))
