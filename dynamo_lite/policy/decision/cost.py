"""Measured costs of local and remote prefills."""

from dataclasses import dataclass
from typing import NamedTuple

#: Factor on the weight of all earlier measurements when a new one is added.
_FADE = 0.9


@dataclass
class FadingMean:
    """Weighted mean over a fading sum: about the last ten values count."""

    amount: float = 0.0
    weight: float = 0.0

    def add(self, amount: float, weight: float) -> None:
        self.amount = self.amount * _FADE + amount
        self.weight = self.weight * _FADE + weight

    @property
    def value(self) -> float | None:
        return self.amount / self.weight if self.weight > 0 else None


class Rates(NamedTuple):
    """Measured rates; None: not measured yet."""

    #: Of prompts computed here, beside all other work of this engine.
    local_tokens_per_s: float | None = None
    #: Of remote prefills, from the claim to the last block.
    remote_tokens_per_s: float | None = None
    #: All other time of a remote prefill, independent of its length.
    remote_fixed_s: float | None = None

    def local_s(self, tokens: int) -> float | None:
        """Estimated seconds of a local prefill of `tokens` uncached tokens."""
        if self.local_tokens_per_s is None:
            return None
        return tokens / self.local_tokens_per_s

    def remote_s(self, tokens: int) -> float | None:
        """Estimated seconds of a remote prefill, from the decision to the step that samples."""
        if self.remote_tokens_per_s is None or self.remote_fixed_s is None:
            return None
        return self.remote_fixed_s + tokens / self.remote_tokens_per_s
