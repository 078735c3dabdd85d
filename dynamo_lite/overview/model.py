"""What is seen of a graph at one moment. The same for the terminal and the page.

Nothing here says where a process can be reached, nor anything of a prompt: whoever sees
the page may know no more than this.
"""

import msgspec


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """One live process. instance: None while it does not say. lease: hexadecimal. model:
    its name without the path.

    state: ready; starting or draining; unwell when it cannot work; silent when it does not
    answer. running, waiting: requests, of a prefill worker its jobs; kv_usage: share of its
    KV blocks, 0 to 1; None where it has none, or does not say.
    """

    component: str
    instance: int | None
    lease: str
    state: str
    model: str = ""
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    age_s: float = 0.0


class Queue(msgspec.Struct, frozen=True, kw_only=True):
    """The prefill queue: jobs waiting and in flight, and their uncached tokens. None:
    nobody knows."""

    jobs: int | None = None
    tokens: int | None = None


class Decisions(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts with one verdict for one reason. total: since the live workers began."""

    verdict: str
    reason: str
    per_s: float
    total: int


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Of what ended lately. p50_s, p95_s: estimates from histogram buckets; None of nothing."""

    count: int = 0
    p50_s: float | None = None
    p95_s: float | None = None


class Transfers(msgspec.Struct, frozen=True, kw_only=True):
    """KV that prefill workers write. jobs: written in full; the totals as in `Decisions`."""

    bytes_per_s: float = 0.0
    jobs_per_s: float = 0.0
    total_bytes: int = 0
    total_jobs: int = 0


class LinkStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A prefill worker's way to a decode worker, both by lease. state: ok or failed."""

    prefill: str
    decode: str
    state: str
    lanes: int = 0
    round_trip_s: float | None = None
    detail: str = ""


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """at: seconds since the epoch. rate_s, latency_s: over how long rates and latencies are;
    rate_s is 0 until there are any. trouble: sentences, what cannot be seen now."""

    at: float
    namespace: str
    rate_s: float
    latency_s: float
    workers: list[Worker] = []
    queue: Queue = Queue()
    in_flight: int | None = None
    decisions: list[Decisions] = []
    ttft: Latency = Latency()
    itl: Latency = Latency()
    transfers: Transfers = Transfers()
    links: list[LinkStatus] = []
    trouble: list[str] = []
