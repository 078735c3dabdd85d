"""The state of a graph at one moment, as the terminal and the dashboard show it.

Contains no addresses and nothing from prompts, because the dashboard needs no API key.
"""

import msgspec


class LiveProcess(msgspec.Struct, frozen=True, kw_only=True):
    """One live process. None: the process has no such value, or did not report it."""

    component: str
    instance: int | None
    #: Hexadecimal.
    lease: str
    #: See `compose.state_of`.
    state: str
    #: Name without the path.
    model: str = ""
    #: Requests; of a prefill worker jobs.
    running: int | None = None
    waiting: int | None = None
    #: Share of the KV blocks in use, 0 to 1.
    kv_usage: float | None = None
    #: Most requests that it runs at a time.
    max_running: int | None = None
    age_s: float = 0.0


class Queue(msgspec.Struct, frozen=True, kw_only=True):
    """The prefill queue; None: unknown."""

    #: Waiting and in flight.
    jobs: int | None = None
    #: Their uncached tokens.
    tokens: int | None = None


class RoleEngines(msgspec.Struct, frozen=True, kw_only=True):
    """The stock engines of one role that Forwarders know."""

    #: prefill, decode or prefill-decode.
    role: str
    known: int
    #: Engines that all Forwarders use.
    usable: int


class Decisions(msgspec.Struct, frozen=True, kw_only=True):
    """Number of prompts with one verdict for one reason."""

    #: remote or local; of Forwarders disaggregated, alone or passed.
    verdict: str
    #: Empty for most verdicts of a Forwarder.
    reason: str
    per_s: float
    #: Since the live workers started.
    total: int


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Recent latencies. Quantiles are estimates from histogram buckets; None without samples."""

    count: int = 0
    p50_s: float | None = None
    p95_s: float | None = None


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """Output tokens, without the first one of each request."""

    per_s: float = 0.0
    #: Between two of a request; None: there were none.
    mean_s: float | None = None


class Transfers(msgspec.Struct, frozen=True, kw_only=True):
    """KV written by prefill workers. Jobs: those written in full. Totals: see `Decisions`."""

    bytes_per_s: float = 0.0
    jobs_per_s: float = 0.0
    total_bytes: int = 0
    total_jobs: int = 0


class FailedLink(msgspec.Struct, frozen=True, kw_only=True):
    """A prefill worker does not use its link to a decode worker."""

    #: Lease, hexadecimal.
    prefill: str
    decode: str
    #: Why.
    detail: str
    #: When it is used again, in seconds since the epoch; None: never.
    next_try: float | None = None


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """The graph at one moment."""

    #: Seconds since the epoch.
    at: float
    namespace: str
    #: Length of the windows of rates and latencies; `rate_s` is 0 until there are rates.
    rate_s: float
    latency_s: float
    workers: list[LiveProcess] = []
    queue: Queue = Queue()
    engines: list[RoleEngines] = []
    #: Requests, of Frontends and Forwarders.
    in_flight: int | None = None
    decisions: list[Decisions] = []
    ttft: Latency = Latency()
    itl: Latency = Latency()
    tokens: Tokens = Tokens()
    transfers: Transfers = Transfers()
    failed_links: list[FailedLink] = []
    #: Sentences about what cannot be seen now.
    trouble: list[str] = []
