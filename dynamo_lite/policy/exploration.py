"""Which decisions are tried the other way, so that both sides stay measured."""

import hashlib

#: Share of the decisions in question.
SHARE = 0.02
#: At most so many a second, and so many at once.
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
        """With which probability a decision in question is tried the other way."""
        return SHARE if self._filled(now) >= 1 else 0.0

    def take(self, now: float) -> None:
        """One was tried."""
        self._trials, self._at = max(self._filled(now) - 1, 0.0), now

    def _filled(self, now: float) -> float:
        return min(_MOST, self._trials + max(now - self._at, 0.0) * _PER_S)
