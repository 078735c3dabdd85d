"""The options of each service in the YAML file, apart from vLLM's own arguments.

docs/configuration.md says what each means. Field names are written in kebab-case there
(`max-local-prefill-length`). Keys that are not named here are vLLM's and go to the engine
(VllmWorker, PrefillWorker) or to vLLM's OpenAI server (Frontend) unchanged. Some options can be
changed while processes run: those in `protocol/live_options.py`. This module imports nothing
heavy: the command line reads it.
"""

from dataclasses import dataclass, field
from typing import Literal

from dynamo_lite.disagg.decision.lanes import ClientPriority
from dynamo_lite.disagg.queue.base import QueueOptions
from dynamo_lite.protocol.options import (
    AdmissionOptions,
    DisaggOptions,
    KvRoutingOptions,
    NaturalOption,
    PortOption,
    PositiveOption,
    SecondsOption,
)


@dataclass(frozen=True, kw_only=True)
class FrontendConfig(AdmissionOptions):
    """The HTTP edge: vLLM's OpenAI app in Python, or vLLM's frontend in Rust."""

    host: str = "127.0.0.1"
    port: PortOption = 8000
    edge: Literal["python", "rust"] = "python"
    edge_binary: str | None = None
    router: Literal["round-robin", "random", "kv", "component"] = "round-robin"
    kv_router: KvRoutingOptions = field(default_factory=KvRoutingOptions)
    default_request_timeout_s: SecondsOption = 600.0
    max_request_timeout_s: SecondsOption = 3600.0
    #: Sequences (`n` of a request) at a time; about what one Python process can stream.
    max_in_flight_requests: PositiveOption = 2048
    #: Prompt tokens of sequences without a first token. A larger backlog would be a minute's work
    #: for several GPUs.
    max_queued_tokens: PositiveOption = 1_000_000
    max_body_bytes: PositiveOption | None = None
    client_priority: ClientPriority = "lower-only"
    dashboard: bool | None = None
    adapter_folder: str | None = None


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """The KV-aware router as a process of its own, for Frontends with `router: component`."""

    kv_router: KvRoutingOptions = field(default_factory=KvRoutingOptions)


@dataclass(frozen=True, kw_only=True)
class VllmWorkerConfig(AdmissionOptions, DisaggOptions):
    """The decode worker.

    It refuses requests beyond its admission limits, so that the engine's own queue stays short.
    """

    remote_prefill: bool = True
    first_token_from_prefill: bool = True
    max_in_flight_requests: PositiveOption = 1024
    max_queued_tokens: PositiveOption = 500_000
    step_timeout_s: SecondsOption = 120.0
    kv_events: bool = True
    queue: QueueOptions = field(default_factory=QueueOptions)


@dataclass(frozen=True, kw_only=True)
class PrefillWorkerConfig:
    min_prefix_read_length: PositiveOption = 128
    concurrency: PositiveOption = 2
    short_slots: NaturalOption = 1
    step_timeout_s: SecondsOption = 120.0
    queue: QueueOptions = field(default_factory=QueueOptions)

    @property
    def most_jobs(self) -> int:
        """How many jobs it may hold at a time."""
        return self.concurrency + self.short_slots
