"""How long to wait before a crashed process is started again."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Restart:
    """Verdict: start again after `delay_s`; this is the `failures`-th failure in a row."""

    delay_s: float
    failures: int


@dataclass(frozen=True, kw_only=True)
class Backoff:
    """Exponential backoff that forgets after a calm time.

    The n-th failure in a row waits `first_s * factor ** (n - 1)` seconds, at most
    `longest_s`. A run of at least `calm_s` starts the count anew.
    """

    first_s: float = 0.5
    factor: float = 2.0
    longest_s: float = 30.0
    calm_s: float = 60.0

    def after_exit(self, failures: int, uptime_s: float) -> Restart:
        """`failures` in a row before this exit, which came after `uptime_s` seconds."""
        count = 1 if uptime_s >= self.calm_s else failures + 1
        # Bounding the exponent keeps a long series from overflowing the float.
        delay = self.first_s * self.factor ** min(count - 1, 64)
        return Restart(delay_s=min(delay, self.longest_s), failures=count)
