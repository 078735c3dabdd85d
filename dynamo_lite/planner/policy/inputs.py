"""What the planner sees of a graph at one moment. Values only.

A missing measurement is None and never 0: an unknown load is no reason to remove a worker.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from dynamo_lite.protocol.planner import RoleCounts


class Role(enum.StrEnum):
    """What a worker is for: its component."""

    PREFILL = "PrefillWorker"
    DECODE = "VllmWorker"

    @property
    def word(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, kw_only=True)
class RoleSeen:
    """One role."""

    #: Of the workers that can be started and removed here.
    counts: RoleCounts = field(default_factory=RoleCounts)
    #: Serving workers that another supervisor has started and that cannot be removed here.
    others: int = 0
    #: The last change that a planner has ordered, this one or another: whether it was one to more,
    #: and when, by that planner's clock. None: none is known.
    changed: tuple[bool, float] | None = None

    @property
    def count(self) -> int:
        """Workers that serve or will serve."""
        return self.counts.starting + self.counts.ready + self.others

    @property
    def serving(self) -> int:
        return self.counts.ready + self.others

    @property
    def devices(self) -> int:
        """Occupied devices, also those of workers that another supervisor has started. A worker
        without a device counts as one."""
        return (self.counts.present + self.others) * self.devices_each

    @property
    def devices_each(self) -> int:
        return max(self.counts.devices_each, 1)


@dataclass(frozen=True, kw_only=True)
class PrefillLoad:
    """Demand for prefill workers, in prompt tokens that no decode worker has cached."""

    #: Of prompts that were sent to prefill workers, per second.
    asked_per_s: float | None = None
    #: Of prompts that were prefilled locally because the queue was full or too slow, per second.
    refused_per_s: float | None = None
    #: Queued and claimed.
    backlog: float | None = None
    #: What one busy prefill worker computes in a second.
    rate: float | None = None

    @property
    def arriving_per_s(self) -> float | None:
        """That prefill workers should compute; None: not known."""
        if self.asked_per_s is None or self.refused_per_s is None:
            return None
        return self.asked_per_s + self.refused_per_s


@dataclass(frozen=True, kw_only=True)
class DecodeLoad:
    """Demand for decode workers. KV is counted in whole workers: 1.5 fills one and a half."""

    kv_used: float | None = None
    #: That the prompts of waiting requests will need.
    kv_waiting: float | None = None
    #: Requests.
    running: float | None = None
    waiting: float | None = None
    #: Part of those that wait: without KV blocks.
    queued: float | None = None
    #: Requests that got KV blocks, per second.
    admitted_per_s: float | None = None
    #: Output tokens of all decode workers per second, and the mean time between two of a request.
    tokens_per_s: float | None = None
    token_s: float | None = None
    #: Most requests that one worker runs at a time; None: not known.
    max_running: int | None = None


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The graph."""

    #: The roles of the graph, prefill workers first. Empty: the supervisor, or Kubernetes, did not
    #: reply.
    roles: Mapping[Role, RoleSeen] = field(default_factory=dict[Role, RoleSeen])
    prefill: PrefillLoad = field(default_factory=PrefillLoad)
    decode: DecodeLoad = field(default_factory=DecodeLoad)
    #: Numbers that an operator has set and that are not reached yet.
    manual: Mapping[Role, int] = field(default_factory=dict[Role, int])
