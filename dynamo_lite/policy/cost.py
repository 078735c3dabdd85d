"""What a prefill costs here and elsewhere, by what was measured."""

from dataclasses import dataclass
from typing import NamedTuple

#: What a new measurement leaves of the weight of all before it.
_FADE = 0.9


@dataclass
class FadingMean:
    """Of a fading sum: the last ten or so count, heavy ones more than light ones."""

    amount: float = 0.0
    weight: float = 0.0

    def add(self, amount: float, weight: float) -> None:
        self.amount = self.amount * _FADE + amount
        self.weight = self.weight * _FADE + weight

    @property
    def value(self) -> float | None:
        return self.amount / self.weight if self.weight > 0 else None


class Rates(NamedTuple):
    """None: not measured yet.

    local_tokens_per_s: of prompts computed here, beside all else that runs here.
    remote_tokens_per_s: of remote prefills from the claim to the last block;
    remote_fixed_s: all that they take besides, whatever their length.
    """

    local_tokens_per_s: float | None = None
    remote_tokens_per_s: float | None = None
    remote_fixed_s: float | None = None

    def local_s(self, tokens: int) -> float | None:
        """Of a prefill of so many uncached tokens here."""
        if self.local_tokens_per_s is None:
            return None
        return tokens / self.local_tokens_per_s

    def remote_s(self, tokens: int) -> float | None:
        """Of one elsewhere, from the decision to the step that samples."""
        if self.remote_tokens_per_s is None or self.remote_fixed_s is None:
            return None
        return self.remote_fixed_s + tokens / self.remote_tokens_per_s
