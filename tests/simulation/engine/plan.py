"""What a simulated engine's scheduler decides for a step, and its connector."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from dynamo_lite.disagg.messages import RankResults
from tests.simulation.engine.request import SimRequest


class SchedulerHalf(Protocol):
    """A scheduler half, called as vLLM calls a KV connector. A step is its message to the rank."""

    def matched(self, request: SimRequest, cached: int) -> tuple[int | None, bool]:
        """Tokens beyond `cached` that come from elsewhere, and whether to wait for them.
        None: not decided yet, the request is asked about again in the next step."""
        ...

    def allocated(self, request: SimRequest, external: int) -> None: ...

    def build_step(self, plan: "StepPlan") -> Any: ...

    def worker_output(self, results: RankResults, report: Any) -> None: ...

    def finished(self, request: SimRequest) -> bool:
        """Whether the blocks must stay until the rank has sent them."""
        ...

    @property
    def busy(self) -> bool: ...


@dataclass
class StepPlan:
    """One step."""

    #: Request id to tokens to compute.
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict[str, int])
    preempted: list[str] = field(default_factory=list[str])
    #: Blocks that the step completes.
    filling: list[int] = field(default_factory=list[int])
    #: The connector's message to its rank.
    step: Any = None

    @property
    def tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())
