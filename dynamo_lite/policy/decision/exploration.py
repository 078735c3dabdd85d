"""Which decisions take the other side as a trial, so that both sides stay measured."""

import hashlib

#: Share of the eligible decisions that become trials.
SHARE = 0.02
#: Limits: trials per second, and trials at once.
_PER_S, _MOST = 1.0, 1.0


def coin(request_id: str) -> float:
    """A number in [0, 1) that the same request always gets."""
    digest = hashlib.blake2b(request_id.encode(), digest_size=4).digest()
    return int.from_bytes(digest) / 2**32


class Exploration:
    """A bucket of trials that fills with time. now: monotonic seconds."""

    def __init__(self) -> None:
        self._trials, self._at = _MOST, 0.0

    def propensity(self, now: float) -> float:
        """The probability with which an eligible decision becomes a trial."""
        return SHARE if self._filled(now) >= 1 else 0.0

    def take(self, now: float) -> None:
        """Counts one trial."""
        self._trials, self._at = max(self._filled(now) - 1, 0.0), now

    def _filled(self, now: float) -> float:
        return min(_MOST, self._trials + max(now - self._at, 0.0) * _PER_S)
