"""The options of each service in the YAML file, apart from vLLM's own arguments.

Field names are written in kebab-case there (`max-local-prefill-length`). Keys
that are not named here are vLLM's and go to the engine (VllmWorker,
PrefillWorker) or to vLLM's OpenAI server (Frontend) unchanged. Some options can be changed
while processes run: those in `protocol/live_options.py`. This module imports nothing heavy:
the command line reads it.
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

    #: Address to listen on.
    host: str = "127.0.0.1"
    #: Port to listen on; 0 takes a free one.
    port: PortOption = 8000
    #: Which of vLLM's HTTP frontends serves.
    edge: Literal["python", "rust"] = "python"
    #: Path of `vllm-rs`, the program of the Rust frontend; None: found beside the vLLM package, or
    #: in the environment variable DYNAMO_LITE_VLLM_RS.
    edge_binary: str | None = None
    #: How a decode worker is chosen; `component` asks the graph's Router.
    router: Literal["round-robin", "random", "kv", "component"] = "round-robin"
    #: Used with `router: kv`.
    kv_router: KvRoutingOptions = field(default_factory=KvRoutingOptions)
    #: Time limit of a request, from its headers to its last token, unless it has the header
    #: `x-request-timeout: SECONDS`.
    default_request_timeout_s: SecondsOption = 600.0
    #: Upper limit on the value of `x-request-timeout`.
    max_request_timeout_s: SecondsOption = 3600.0
    #: Sequences (`n` of a request) at a time; about what one Python process can stream.
    max_in_flight_requests: PositiveOption = 2048
    #: Prompt tokens of sequences without a first token. A larger backlog would be a minute's work
    #: for several GPUs.
    max_queued_tokens: PositiveOption = 1_000_000
    #: Size limit of a request's body; None: 2 MiB and 64 bytes for each token of the model's
    #: length, at most 32 MiB.
    max_body_bytes: PositiveOption | None = None
    #: What a request's `priority` may do.
    client_priority: ClientPriority = "lower-only"
    #: Whether the page /dashboard is served to everyone who reaches the port; None: only on a
    #: loopback address.
    dashboard: bool | None = None


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """The KV-aware router as a process of its own, for Frontends with `router: component`."""

    kv_router: KvRoutingOptions = field(default_factory=KvRoutingOptions)


@dataclass(frozen=True, kw_only=True)
class ProcessorConfig:
    """Chat template, tokenisation, detokenisation; runs inside the Frontend."""


@dataclass(frozen=True, kw_only=True)
class VllmWorkerConfig(AdmissionOptions, DisaggOptions):
    """The decode worker.

    It refuses requests beyond its admission limits, so that the engine's own queue stays short.
    """

    #: Whether prompts may be prefilled by prefill workers at all.
    remote_prefill: bool = True
    #: Whether the first token of an answer may come from the prefill worker.
    first_token_from_prefill: bool = True
    max_in_flight_requests: PositiveOption = 1024
    max_queued_tokens: PositiveOption = 500_000
    #: An engine that has work but completes no step for this long has failed. Until its first
    #: token the limit is at least 900 s, since it may compile kernels.
    step_timeout_s: SecondsOption = 120.0
    #: Whether the worker publishes to routers which prefixes it holds, and its load.
    kv_events: bool = True
    queue: QueueOptions = field(default_factory=QueueOptions)


@dataclass(frozen=True, kw_only=True)
class PrefillWorkerConfig:
    #: A prefix of at least this many tokens that the decode engine holds, and this one does not,
    #: is read from there; a shorter one is computed. More than the longest prompt: never read.
    min_prefix_read_length: PositiveOption = 128
    #: Jobs that it holds at a time.
    concurrency: PositiveOption = 2
    #: Number of short and urgent jobs beside these.
    short_slots: NaturalOption = 1
    #: See the same option of the decode worker.
    step_timeout_s: SecondsOption = 120.0
    queue: QueueOptions = field(default_factory=QueueOptions)

    @property
    def most_jobs(self) -> int:
        """How many jobs it may hold at a time."""
        return self.concurrency + self.short_slots
