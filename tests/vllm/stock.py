"""Stock vLLM servers with a KV connector, behind a Forwarder. They know nothing of dynamo-lite."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tests.ports import reserved_port
from tests.started import descendants_of, eventually, send
from tests.vllm.graph import Graph, PlainServer

FORWARD = ("graphs.forward:Forwarder", "configs/forward_nixl.yaml")

Role = Literal["prefill", "decode"]
Protocol = Literal["nixl", "nixl-push"]
_CONNECTORS: dict[Protocol, str] = {"nixl": "NixlConnector", "nixl-push": "NixlPushConnector"}
_KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


class StockEngine(PlainServer):
    """`vllm serve` with the connector of a protocol."""

    def __init__(self, directory: Path, role: Role, protocol: Protocol):
        config: dict[str, Any] = {
            "kv_connector": _CONNECTORS[protocol],
            "kv_role": _KV_ROLES[role],
            "kv_buffer_device": "cpu",
            "kv_load_failure_policy": "recompute",
        }
        port = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(reserved_port())}
        super().__init__(directory / role, flags={"kv-transfer-config": config}, env=port)
        self.role: Role = role

    def kill(self) -> None:
        """vLLM's engine process outlives the kill of its server, so it is killed, too."""
        for pid in (self.pid, *descendants_of(self.pid)):
            send(pid, signal.SIGKILL)


@dataclass
class Forwarded:
    """A Forwarder with its engines."""

    graph: Graph
    prefill: StockEngine
    decode: StockEngine

    def answers(self, how: str) -> float:
        return self.graph.count("Forwarder", "dynamo_lite_forward_answers_total", how=how)


@contextmanager
def forwarded(directory: Path, protocol: Protocol) -> Iterator[Forwarded]:
    """Two engines that are started one beside the other, and then a Forwarder."""
    prefill = StockEngine(directory, "prefill", protocol)
    decode = StockEngine(directory, "decode", protocol)
    with prefill, decode:
        listed = ", ".join(f'{{url: "{one.url}", role: {one.role}}}' for one in (prefill, decode))
        options = (f"--Forwarder.engines=[{listed}]", f"--Forwarder.protocol={protocol}")
        with Graph(directory / "forwarder", FORWARD, options, http="Forwarder") as graph:
            # Ready is the Forwarder's port; the engines are found healthy a moment later.
            healthy = "the engines are healthy"
            eventually(lambda: graph.health("Forwarder")["ok"], timeout_s=30, what=healthy)
            yield Forwarded(graph, prefill, decode)
