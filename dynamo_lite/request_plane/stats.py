"""What a failover client counts."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class FailoverStats:
    """Counts since the start.

    moved: losses of a worker after which the request was sent again, by what that
    meant: "fresh" (it had given no token), "continue", "replay". lost: requests
    ended by WorkerLost. expired: by their deadline.
    """

    moved: Counter[str] = field(default_factory=Counter[str])
    lost: int = 0
    expired: int = 0
