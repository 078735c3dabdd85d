"""Counts of a `FailoverClient`."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class FailoverStats:
    """Counts since the start."""

    #: Migrations by kind: "fresh" (the request had no token yet), "continue", "replay".
    moved: Counter[str] = field(default_factory=Counter[str])
    #: How many of these migrations were off draining workers.
    drained: int = 0
    #: Requests that ended with WorkerLost.
    lost: int = 0
    #: Requests that ended by their timeout.
    expired: int = 0
