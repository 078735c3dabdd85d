"""The delay before a crashed process is restarted."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Backoff:
    """Exponential backoff that is reset by a long run.

    The n-th failure in a row waits `first_s * factor ** (n - 1)` seconds, at most `longest_s`. A
    run of at least `calm_s` resets the count.
    """

    first_s: float = 0.5
    factor: float = 2.0
    longest_s: float = 30.0
    calm_s: float = 60.0

    def after_exit(self, failures: int, uptime_s: float = 0.0) -> tuple[int, float]:
        """The failures in a row with this exit, and the seconds until the restart. failures: before
        it. uptime_s: of the process that exited."""
        count = 1 if uptime_s >= self.calm_s else failures + 1
        # Bounding the exponent keeps a long series from overflowing the float.
        delay = self.first_s * self.factor ** min(count - 1, 64)
        return count, min(delay, self.longest_s)
