"""A mean that forgets."""

from dataclasses import dataclass

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
