"""The options of the Forwarder in the YAML file. Imports nothing heavy: the command line does."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import annotated_types as at

from dynamo_lite.policy.forwarding import Strategy
from dynamo_lite.protocol.options import KvRoutingOptions, Natural, Positive, Seconds

Role = Literal["prefill", "decode", "prefill-decode"]
#: The keys of `forward/protocols/registry.py`.
ProtocolName = Literal[
    "nixl",
    "nixl-push",
    "mooncake",
    "llumnix-mooncake",
    "moriio-read",
    "moriio-write",
    "sglang",
    "neuron-static",
    "neuron-dynamic",
    "kvt-batch",
    "kvt-staged",
]
Port = Annotated[int, at.Gt(0), at.Le(65535)]


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """One stock engine."""

    #: `http://HOST:PORT` of its OpenAI server.
    url: str
    #: Which legs it may take.
    role: Role
    #: Where its side of the handover listens; None: the URL's host.
    transfer_host: str | None = None
    #: Port of that: Mooncake's and SGLang's bootstrap server, KVT, MoRIIO's handshake; None: the
    #: protocol's default.
    transfer_port: Port | None = None
    #: MoRIIO's second port; None: its default.
    notify_port: Port | None = None

    def __post_init__(self) -> None:
        parse_engine_url(self.url)

    @property
    def address(self) -> tuple[str, int]:
        return parse_engine_url(self.url)


@dataclass(frozen=True, kw_only=True)
class ForwardRoutingOptions(KvRoutingOptions):
    """How the choices `least-load` and `prefix` weigh engines."""

    #: Most different blocks of 256 bytes that are remembered.
    max_index_blocks: Positive = 500_000


@dataclass(frozen=True, kw_only=True)
class ForwarderConfig:
    """An HTTP server in front of stock engines."""

    #: Address to listen on.
    host: str = "127.0.0.1"
    #: Port to listen on; 0 takes a free one.
    port: Annotated[int, at.Ge(0), at.Le(65535)] = 8000
    #: The engines' handover protocol.
    protocol: ProtocolName = "nixl"
    engines: tuple[EngineOptions, ...]
    #: How the engine of a prefill leg is chosen.
    prefill_choice: Strategy = "round-robin"
    #: As prefill_choice, for decode legs.
    decode_choice: Strategy = "round-robin"
    #: Whether the decode engine is chosen with the prefill engine or after the prefill leg. Only
    #: of serial protocols: the others need both at once.
    choose_decode: Literal["batch", "staged"] = "batch"
    routing: ForwardRoutingOptions = field(default_factory=ForwardRoutingOptions)
    #: Prompts with at most this many uncached tokens (estimated) get no prefill leg; 0: all get
    #: one.
    max_local_prefill_length: Natural = 0
    #: What follows when the prefill engine fails; a 4xx of it is the client's answer in any case.
    prefill_failure: Literal["decode-only", "error"] = "decode-only"
    #: Decode engines that one request may try before its first byte.
    max_attempts: Positive = 3
    #: Of a connection to an engine.
    connect_timeout_s: Seconds = 2.0
    #: Of a whole prefill leg.
    prefill_timeout_s: Seconds = 120.0
    #: Without any byte of an answer.
    idle_timeout_s: Seconds = 600.0
    #: Between two checks of an engine's `/health`.
    health_interval_s: Seconds = 1.0
    health_timeout_s: Seconds = 5.0
    #: Between two readings of an engine's `/metrics`, for `least-load` and `prefix`.
    load_interval_s: Seconds = 1.0
    #: Of a request.
    max_body_bytes: Positive = 32 << 20
    #: How long a request's body may take to arrive.
    body_timeout_s: Seconds = 60.0

    def __post_init__(self) -> None:
        """Raises ValueError."""
        urls = [engine.address for engine in self.engines]
        for engine, url in zip(self.engines, urls, strict=True):
            if urls.count(url) > 1:
                raise ValueError(f"{engine.url} is named twice; list each engine once")
        if not any(engine.role != "prefill" for engine in self.engines):
            raise ValueError("no engine decodes; give one the role decode or prefill-decode")
        roles = sorted(engine.role for engine in self.engines)
        if self.protocol == "neuron-static" and roles != ["decode", "prefill"]:
            raise ValueError(
                "neuron-static is for one prefill and one decode engine; use neuron-dynamic"
            )


def parse_engine_url(url: str) -> tuple[str, int]:
    """Host and port. Raises ValueError."""
    problem = "expected http://HOST:PORT without a path, a query or credentials"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as exc:
        raise ValueError(f"{problem}: {exc}") from exc
    extra: list[Any] = [parts.path.strip("/"), parts.query, parts.fragment, parts.username]
    if parts.scheme != "http" or not host or port is None or any(extra):
        raise ValueError(problem)
    return host, port
