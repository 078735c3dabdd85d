"""What a simulated engine's scheduler decides for a step, and whom it asks."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from dynamo_lite.disagg.messages import RankResults
from dynamo_lite.simulation.engine.request import SimRequest


class Connector(Protocol):
    """A scheduler half, asked as vLLM asks a KV connector. Step: what it tells the rank."""

    def matched(self, request: SimRequest, cached: int) -> tuple[int | None, bool]:
        """Tokens beyond `cached` that come from elsewhere, and whether to wait for them.
        None: not decided yet, the request is asked about again in the next step."""
        ...

    def allocated(self, request: SimRequest, external: int) -> None: ...

    def build_step(self, plan: "Plan") -> Any: ...

    def worker_output(self, results: RankResults, report: Any) -> None: ...

    def finished(self, request: SimRequest) -> bool:
        """Whether the blocks must stay until the rank has sent them."""
        ...

    @property
    def busy(self) -> bool: ...


@dataclass
class Plan:
    """One step: request id -> tokens to compute; the connector's word to its rank.

    filling: blocks that it completes.
    """

    num_scheduled_tokens: dict[str, int] = field(default_factory=dict[str, int])
    preempted: list[str] = field(default_factory=list[str])
    filling: list[int] = field(default_factory=list[int])
    step: Any = None

    @property
    def tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())
