"""Carries the connector halves' counts to the component on vLLM's own way up."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats


class ConnectorStats(KVConnectorStats):
    """data: name -> number, or list of numbers (see `Counts`)."""

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
