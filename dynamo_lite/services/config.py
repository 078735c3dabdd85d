"""What each service may be told in the YAML file, apart from vLLM's own arguments.

Field names are written in kebab-case there (`max-local-prefill-length`). Keys
that are not named here are vLLM's and go to the engine (VllmWorker,
PrefillWorker) or to vLLM's OpenAI server (Frontend) as they are. Some can be changed
while processes run: those in `protocol/live_options.py`. This module imports nothing heavy:
the command line reads it.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

import annotated_types as at

from dynamo_lite.policy.lanes import ClientPriority
from dynamo_lite.protocol.live_options import Natural, Positive, Seconds, Share, Weight

#: Whether each rank has a thread that moves KV transfers on between the engine's steps; auto:
#: where the KV is on a GPU.
TransferThread = Literal["auto", "always", "never"]


@dataclass(frozen=True, kw_only=True)
class KvRouterOptions:
    """How the KV-aware router weighs workers; amounts are tokens of prompt.

    kv_weight: of a token that a worker holds. load_weight: of a token that is in the way
    there. request_load_tokens: what a request in the engine counts for, beside its
    prompt. temperature: 0 takes the best worker; higher ones draw, the more evenly.
    max_kv_usage: from this share of its KV cache in use on, a worker gets nothing
    while another one has room. max_index_blocks: different blocks that are remembered.
    """

    kv_weight: Weight = 2.0
    load_weight: Weight = 1.0
    request_load_tokens: Natural = 32
    temperature: Weight = 0.0
    max_kv_usage: Share = 0.95
    max_index_blocks: Positive = 2_000_000


@dataclass(frozen=True, kw_only=True)
class CanaryOptions:
    """Requests of the Frontend's own, to workers that nobody uses.

    interval_s: a worker that has answered nobody for so long is sent one; 0: never.
    timeout_s: for its answer; then it is aborted, and the worker out of rotation.
    max_tokens: of its answer. max_per_minute: of all workers together.
    """

    interval_s: Annotated[float, at.Ge(0)] = 0.0
    timeout_s: Seconds = 10.0
    max_tokens: Annotated[int, at.Gt(0), at.Le(64)] = 1
    max_per_minute: Annotated[int, at.Gt(0), at.Le(600)] = 30


@dataclass(frozen=True, kw_only=True)
class FrontendConfig:
    """The HTTP edge: vLLM's OpenAI app.

    host, port: where it listens; port 0 takes a free one.
    router: how a decode worker is chosen; `component` asks the graph's Router.
    kv_router: options of `kv`. canary: requests that try idle workers.
    request_timeout_s: how long a worker may take to accept a request.
    default_request_timeout_s: time of a request, from its headers to its last
    token, unless it says `x-request-timeout: SECONDS`; max_request_timeout_s: more
    is not granted. max_moves: losses of a worker that a request survives; few,
    because a request may be what its workers die of. max_in_flight_requests:
    sequences (`n` of a request) at a time; about what one Python process can
    stream. max_queued_tokens: prompt tokens of sequences without a first token; a
    backlog of more would be a minute's work for several GPUs. max_body_bytes: of a
    request; None: 2 MiB and 64 bytes for each token of the model's length, at most 32 MiB.
    client_priority: what a request's `priority` may do. dashboard: whether the page
    /dashboard is served, to whoever reaches the port; None: only on a loopback address.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, at.Ge(0), at.Le(65535)] = 8000
    router: Literal["round-robin", "random", "kv", "component"] = "round-robin"
    kv_router: KvRouterOptions = field(default_factory=KvRouterOptions)
    canary: CanaryOptions = field(default_factory=CanaryOptions)
    request_timeout_s: Seconds = 5.0
    default_request_timeout_s: Seconds = 600.0
    max_request_timeout_s: Seconds = 3600.0
    max_moves: Natural = 3
    max_in_flight_requests: Positive = 2048
    max_queued_tokens: Positive = 1_000_000
    max_body_bytes: Positive | None = None
    client_priority: ClientPriority = "lower-only"
    dashboard: bool | None = None


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """The KV-aware router as a process of its own, for Frontends with `router: component`."""

    kv_router: KvRouterOptions = field(default_factory=KvRouterOptions)


@dataclass(frozen=True, kw_only=True)
class ProcessorConfig:
    """Chat template, tokenisation, detokenisation; runs inside the Frontend.

    request_timeout_s: longest answer of the `chat/completions` and
    `completions` endpoints over NATS.
    """

    request_timeout_s: Seconds = 600.0


@dataclass(frozen=True, kw_only=True)
class QueueOptions:
    """The prefill queue; every service of a graph must agree (use Common).

    max_jobs: hard cap that the broker holds, waiting and in flight together.
    order: fifo, or short-first: short jobs and urgent requests before others.
    short_length: tokens to compute up to which a job is short.
    """

    max_jobs: Positive = 64
    ack_wait_s: Seconds = 10.0
    max_deliver: Positive = 3
    order: Literal["fifo", "short-first"] = "short-first"
    short_length: Natural = 2048


@dataclass(frozen=True, kw_only=True)
class VllmWorkerConfig:
    """The decode worker.

    remote_prefill: whether it may ask prefill workers for help at all.
    max_local_prefill_length: prompts with at most this many uncached tokens are
    prefilled here. max_prefill_queue_size: with this many jobs in the queue or
    more, everything is. max_prefill_queue_tokens: likewise with this many outstanding
    tokens; 0: no matter how many. remote_prefill_timeout_s: how long a remote prefill may
    take from the decision to the last block; then the prompt is prefilled here.
    queue_view_max_age_s: an older view of the queue counts as unknown, and
    unknown means local. single_flight_min_length: a prompt waits for another one's
    remote prefill when they share at least so many uncached tokens, and most of
    either; None for max_local_prefill_length. max_remote_prefills: how many prefill
    workers one prompt may ask, one after the other, as they are lost, within
    remote_prefill_timeout_s; then the rest of it is prefilled here.
    max_in_flight_requests,
    max_queued_tokens: beyond so many sequences, or prompt tokens of those without a
    first token, requests are refused for a while; the engine's own queue stays about
    that short. step_timeout_s: an engine that has work, but makes no step for so long, is
    given up; until its first token not before 900 s, since it may compile kernels.
    kv_events: whether routers are told which prefixes it holds, and its load.
    transfer_thread: see `TransferThread`.
    """

    remote_prefill: bool = True
    max_local_prefill_length: Natural = 512
    max_prefill_queue_size: Natural = 8
    max_prefill_queue_tokens: Natural = 0
    remote_prefill_timeout_s: Seconds = 30.0
    queue_view_max_age_s: Seconds = 3.0
    single_flight_min_length: Natural | None = None
    max_remote_prefills: Positive = 2
    max_in_flight_requests: Positive = 1024
    max_queued_tokens: Positive = 500_000
    step_timeout_s: Seconds = 120.0
    kv_events: bool = True
    transfer_thread: TransferThread = "auto"
    queue: QueueOptions = field(default_factory=QueueOptions)


@dataclass(frozen=True, kw_only=True)
class PrefillWorkerConfig:
    """The prefill worker. concurrency: jobs it holds at a time. short_slots: beside these,
    short and urgent ones (`queue.order: short-first`).

    kv_checksum_rate: share of the blocks of each job whose contents are checked at
    the decode worker before they are used, 0 to 1. min_prefix_read_length: from how
    many tokens on a prefix that the decode worker holds, and this one does not, is
    read from there; a shorter one is computed. More than the longest prompt: never.
    stream_layers: whether each layer's blocks are written as soon as a step has run the
    layer, not after the step; only with vLLM's `enforce-eager`. step_timeout_s: as of a
    decode worker. transfer_thread: see `TransferThread`.
    """

    concurrency: Positive = 2
    short_slots: Natural = 1
    kv_checksum_rate: Annotated[float, at.Ge(0), at.Le(1)] = 0.0
    min_prefix_read_length: Positive = 128
    stream_layers: bool = False
    step_timeout_s: Seconds = 120.0
    transfer_thread: TransferThread = "auto"
    queue: QueueOptions = field(default_factory=QueueOptions)
