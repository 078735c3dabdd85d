"""The results of seeds: of one, and of many together."""

from collections import Counter
from dataclasses import dataclass, field

import msgspec


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """How long one request waited for its end, and its time limit (seconds)."""

    seed: int = 0
    request: str = ""
    waited_s: float = 0.0
    limit_s: float = 0.0
    how: str = ""

    @property
    def over_s(self) -> float:
        """Beyond its limit; negative before that."""
        return self.waited_s - self.limit_s

    def __str__(self) -> str:
        return (
            f"{self.waited_s:.3f} s of {self.limit_s:.3f} s"
            f" (seed {self.seed}, {self.request}: {self.how})"
        )


class Waits(msgspec.Struct, kw_only=True):
    """longest: of all. latest: the one that came closest to its limit, or went beyond."""

    longest: Wait | None = None
    latest: Wait | None = None

    def add(self, wait: Wait | None) -> None:
        if wait is None:
            return
        if self.longest is None or wait.waited_s > self.longest.waited_s:
            self.longest = wait
        if self.latest is None or wait.over_s > self.latest.over_s:
            self.latest = wait


class Played(msgspec.Struct, kw_only=True):
    """The result of one seed, as plain data.

    virtual_s: its duration. cancel_s: the longest time that a cancel needed to reach a prefill
    worker. Both in virtual time.
    """

    seed: int
    profile: str = ""
    violations: list[str] = []
    counts: dict[str, int] = {}
    waits: Waits = msgspec.field(default_factory=Waits)
    cancel_s: float = 0.0
    virtual_s: float = 0.0
    fingerprint: str = ""


@dataclass
class Tally:
    """The results of many seeds. The order in which they are added changes nothing."""

    seeds: int = 0
    #: Seed to its first violation.
    violated: dict[int, str] = field(default_factory=dict[int, str])
    #: Seed to the reason why it has no result.
    lost: dict[int, str] = field(default_factory=dict[int, str])
    counts: Counter[str] = field(default_factory=Counter[str])
    waits: Waits = field(default_factory=Waits)
    cancel_s: float = 0.0
    virtual_s: float = 0.0

    def add(self, played: Played) -> None:
        self.seeds += 1
        self.virtual_s += played.virtual_s
        self.cancel_s = max(self.cancel_s, played.cancel_s)
        self.counts.update(played.counts)
        self.counts[f"profile {played.profile}"] += 1
        self.waits.add(played.waits.longest)
        self.waits.add(played.waits.latest)
        if played.violations:
            self.violated[played.seed] = played.violations[0]

    def lose(self, seed: int, why: str) -> None:
        self.lost[seed] = why

    @property
    def bad(self) -> list[tuple[int, str]]:
        """Seeds with a violation or without a result, and the reason, in order."""
        return sorted({**self.violated, **self.lost}.items())
