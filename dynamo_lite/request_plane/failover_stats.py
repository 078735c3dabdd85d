"""Counts of a `FailoverClient`."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class FailoverStats:
    """Counts since the start."""

    #: Migrations by kind: "fresh" (it had given no token), "continue", "replay".
    moved: Counter[str] = field(default_factory=Counter[str])
    #: Those of them off workers that leave in order.
    drained: int = 0
    #: Requests that ended with WorkerLost.
    lost: int = 0
    #: Requests that ended by their timeout.
    expired: int = 0
