"""What a run simulates: the graph and its options. Defaults are those of the services."""

from dataclasses import dataclass, field
from typing import Literal

from dynamo_lite.policy.routing.admission import Limits
from dynamo_lite.protocol.options import DecisionThresholds, KvRoutingOptions

RouterName = Literal["round-robin", "random", "kv"]


@dataclass(frozen=True)
class WorkerCounts:
    """Workers of each role."""

    prefill: int
    decode: int

    def __str__(self) -> str:
        return f"{self.prefill}P{self.decode}D"

    @property
    def total(self) -> int:
        return self.prefill + self.decode


@dataclass(frozen=True, kw_only=True)
class Slo:
    """The targets that a request meets or misses, in seconds."""

    ttft_s: float = 2.0
    #: Mean time between the tokens of the request.
    itl_s: float = 0.05


@dataclass(frozen=True, kw_only=True)
class GraphModelOptions:
    """One graph. `tests/unit/test_capacity_run.py` compares the defaults with those of
    `services/config.py` and `queue/base.py`."""

    router: RouterName = "round-robin"
    routing: KvRoutingOptions = field(default_factory=KvRoutingOptions)
    thresholds: DecisionThresholds = field(default_factory=DecisionThresholds)
    worker_limits: Limits = field(
        default_factory=lambda: Limits(in_flight=1024, prompt_tokens=500_000)
    )
    #: Admission limits of all Frontends together; none by default, since their number is not
    #: simulated.
    frontend_limits: Limits = field(default_factory=Limits)
    concurrency: int = 2
    short_slots: int = 1
    short_length: int = 2048
    order: Literal["fifo", "short-first"] = "short-first"
    max_jobs: int = 64
    first_token_from_prefill: bool = True
    steal_back: bool = True
    #: Delay after which a decode engine knows the backlog of others.
    backlog_age_s: float = 0.1
    #: Time between two load reports of a worker to the router.
    load_period_s: float = 1.0
    #: Tokens per hash of the trace.
    block_tokens: int = 512
    max_index_blocks: int = 2_000_000
    slo: Slo = field(default_factory=Slo)
    seed: int = 0
