"""Stock vLLM servers with a KV connector, behind a Forwarder. They know nothing of dynamo-lite."""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tests.ports import reserved_port
from tests.vllm.graph import Graph, PlainServer, command_line, descendants_of

FORWARD = ("graphs.forward:Forwarder", "configs/forward_nixl.yaml")

#: Four that start at the same time on a busy machine.
_READY_S = 480.0
#: Short: a test waits until what is not read is free.
PAIR_LEASE_S = 6.0

Role = Literal["prefill", "decode"]
Protocol = Literal["nixl", "nixl-push"]
CONNECTORS: dict[Protocol, str] = {"nixl": "NixlConnector", "nixl-push": "NixlPushConnector"}
_KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


class StockEngine(PlainServer):
    """`vllm serve` with a connector. lease_s: how long a prefill engine keeps blocks that no
    decode engine reads."""

    def __init__(self, directory: Path, role: Role, connector: str, *, lease_s: float = 30.0):
        config: dict[str, Any] = {
            "kv_connector": connector,
            "kv_role": _KV_ROLES[role],
            "kv_buffer_device": "cpu",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"kv_lease_duration": lease_s},
        }
        super().__init__(directory, flags={"kv-transfer-config": config})
        self.role: Role = role
        self._ready_s = _READY_S
        self._env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(reserved_port())

    def kill(self) -> None:
        """vLLM's engine process outlives the kill of its server, so it is killed, too."""
        for pid in (self.pid, *descendants_of(self.pid)):
            _kill(pid)

    def kill_core(self) -> None:
        """Only vLLM's engine process; its server notices and ends."""
        for pid in descendants_of(self.pid):
            if "EngineCore" in command_line(pid):
                _kill(pid)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@dataclass
class Forwarded:
    """A Forwarder with its engines."""

    graph: Graph
    prefill: list[StockEngine]
    decode: list[StockEngine]


@contextmanager
def forwarding(
    directory: Path,
    prefill: list[StockEngine],
    decode: list[StockEngine],
    *,
    protocol: Protocol = "nixl",
) -> Iterator[Forwarded]:
    """A Forwarder in front of engines that the caller has started."""
    every = [*prefill, *decode]
    listed = ", ".join(f'{{url: "{engine.url}", role: {engine.role}}}' for engine in every)
    engines = (f"--Forwarder.engines=[{listed}]", f"--Forwarder.protocol={protocol}")
    with Graph(directory, FORWARD, engines, http="Forwarder") as graph:
        yield Forwarded(graph, prefill, decode)


@contextmanager
def forwarded(
    directory: Path,
    *,
    protocol: Protocol = "nixl",
    prefill: int = 1,
    decode: int = 1,
    lease_s: float = 30.0,
) -> Iterator[Forwarded]:
    """Engines that are started one beside the other, and then a Forwarder."""
    with ExitStack() as stack:
        engines: dict[Role, list[StockEngine]] = {"prefill": [], "decode": []}
        counts: dict[Role, int] = {"prefill": prefill, "decode": decode}
        for role, count in counts.items():
            for number in range(count):
                engine = StockEngine(
                    directory / f"{role}-{number}",
                    role,
                    CONNECTORS[protocol],
                    lease_s=lease_s,
                )
                engines[role].append(stack.enter_context(engine))
        yield stack.enter_context(
            forwarding(directory / "forwarder", *engines.values(), protocol=protocol)
        )


@dataclass
class StockPair:
    """A prefill and a decode engine with NixlConnector."""

    prefill: StockEngine
    decode: StockEngine


@contextmanager
def stock_pair(directory: Path) -> Iterator[StockPair]:
    connector = CONNECTORS["nixl"]
    with (
        StockEngine(directory / "prefill", "prefill", connector, lease_s=PAIR_LEASE_S) as prefill,
        StockEngine(directory / "decode", "decode", connector, lease_s=PAIR_LEASE_S) as decode,
    ):
        yield StockPair(prefill, decode)
