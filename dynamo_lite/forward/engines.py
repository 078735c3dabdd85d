"""The engines behind a Forwarder: what is known of each one, and which may take a leg."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from dynamo_lite.forward.options import EngineOptions
from dynamo_lite.forward.protocols.base import ForwardProtocol, Peer
from dynamo_lite.policy.forwarding import EngineView
from dynamo_lite.runtime.address import host_port

#: Failed checks after which an engine that answers late or with an error is unhealthy. One that
#: refuses connections is so at once.
FAILURES = 2


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What an engine said of its load."""

    requests: int
    kv_usage: float


@dataclass(slots=True, eq=False)
class Engine:
    """One engine; its number is its place in the configuration."""

    number: int
    options: EngineOptions
    protocol: ForwardProtocol
    healthy: bool = False
    #: Why it is not healthy or not used.
    trouble: str = "not checked yet"
    failures: int = 0
    #: Names that it serves; empty: it did not say.
    models: tuple[str, ...] = ()
    #: Legs of this process that have not ended.
    legs: int = 0
    #: Estimated tokens of those without a first byte.
    waiting_tokens: int = 0
    #: Requests there that are not of this process.
    other_requests: int = 0
    kv_usage: float = 0.0
    identity: Mapping[str, Any] | None = None
    engine_ids: dict[int, str] = field(default_factory=dict[int, str])
    #: HOST:PORT.
    name: str = field(init=False)
    base: str = field(init=False)
    #: Where its side of the handover listens.
    transfer_address: tuple[str, int] = field(init=False)

    def __post_init__(self) -> None:
        host, port = self.options.address
        self.name = host_port(host, port)
        self.base = f"http://{self.name}"
        own = self.options.transfer_port or self.protocol.default_port
        self.transfer_address = (
            self.options.transfer_host or host,
            own or port + self.protocol.port_offset,
        )

    @property
    def prefills(self) -> bool:
        return self.options.role != "decode"

    @property
    def decodes(self) -> bool:
        return self.options.role != "prefill"

    @property
    def decodes_alone(self) -> bool:
        """Whether it can answer a request that has no prefill leg."""
        return self.options.role == "prefill-decode" or (
            self.decodes and self.protocol.decodes_alone
        )

    @property
    def usable(self) -> bool:
        return self.healthy and not self.trouble

    @property
    def can_prefill(self) -> bool:
        if not self.prefills or not self.usable:
            return False
        return bool(self.engine_ids) or not self.protocol.query_path

    @property
    def peer(self) -> Peer:
        host, port = self.transfer_address
        return Peer(
            address=self.name,
            host=host,
            port=port,
            notify_port=self.options.notify_port or 0,
            identity=self.identity,
            engine_ids=self.engine_ids,
        )

    def passed(self) -> bool:
        """A check has passed. Returns whether the engine was unhealthy before."""
        before, self.healthy, self.failures = self.healthy, True, 0
        if not before:
            self.trouble = ""
        return not before

    def failed(self, why: str, *, at_once: bool = False) -> bool:
        """A check or a connection has failed. Returns whether the engine was healthy before.

        at_once: without waiting for a second failure.
        """
        self.failures += 1
        if not self.healthy or not (at_once or self.failures >= FAILURES):
            return False
        self.healthy, self.trouble = False, why
        self.forget()
        return True

    def forget(self) -> None:
        """Forgets what another process at this address would say otherwise."""
        self.identity, self.other_requests, self.kv_usage = None, 0, 0.0
        self.engine_ids = {}

    def reported(self, load: EngineLoad) -> None:
        self.other_requests = max(0, load.requests - self.legs)
        self.kv_usage = load.kv_usage

    @contextmanager
    def leg(self, tokens: int) -> Iterator["EngineLeg"]:
        """Counts a leg while the context lasts."""
        self.legs += 1
        self.waiting_tokens += tokens
        leg = EngineLeg(self, tokens)
        try:
            yield leg
        finally:
            leg.answered()
            self.legs -= 1


class EngineLeg:
    """A leg that counts as load of an engine."""

    __slots__ = ("_engine", "_tokens")

    def __init__(self, engine: Engine, tokens: int):
        self._engine, self._tokens = engine, tokens

    def answered(self) -> None:
        """Its first byte has come: the prompt is computed."""
        self._engine.waiting_tokens -= self._tokens
        self._tokens = 0


class Engines:
    """All engines of one Forwarder."""

    def __init__(self, options: Sequence[EngineOptions], protocol: ForwardProtocol):
        self.all = tuple(Engine(n, one, protocol) for n, one in enumerate(options))

    def __getitem__(self, number: int) -> Engine:
        return self.all[number]

    def prefilling(self, without: Collection[int]) -> list[Engine]:
        return [e for e in self.all if e.can_prefill and e.number not in without]

    def decoding(self, without: Collection[int], *, alone: bool) -> list[Engine]:
        """alone: for a request without a prefill leg."""
        return [
            e
            for e in self.all
            if e.usable and (e.decodes_alone if alone else e.decodes) and e.number not in without
        ]


def view(engine: Engine, matched: int, request_load_tokens: int) -> EngineView:
    requests = engine.legs + engine.other_requests
    return EngineView(
        engine=engine.number,
        matched=matched,
        load=engine.waiting_tokens + requests * request_load_tokens,
        kv_usage=engine.kv_usage,
    )


#: Sums over all label sets of these are what an engine runs and what waits there: vLLM, SGLang.
_REQUESTS = (
    *("vllm:num_requests_running", "vllm:num_requests_waiting"),
    *("sglang:num_running_reqs", "sglang:num_queue_reqs"),
)
_USAGE = ("vllm:kv_cache_usage_perc", "sglang:token_usage")


def parse_load(page: str) -> EngineLoad | None:
    """Reads an engine's Prometheus page; None without any of the metrics.

    Only these lines are read: vLLM's page has hundreds of them, most of histograms.
    """
    requests, usage, found = 0.0, 0.0, False
    for line in page.splitlines():
        if not line.startswith(("vllm:", "sglang:")):
            continue
        name = line.partition("{")[0].partition(" ")[0]
        if name not in _REQUESTS and name not in _USAGE:
            continue
        try:
            value = float(line.rpartition(" ")[2])
        except ValueError:
            continue
        found = True
        if name in _REQUESTS:
            requests += value
        else:
            usage = max(usage, value)
    return EngineLoad(int(requests), usage) if found else None
