"""How fast requests are served, measured on those of one Frontend."""

from collections import deque
from dataclasses import dataclass, field

from dynamo_lite.policy.fading_mean import FadingMean
from dynamo_lite.policy.scaling.drain import Pace

#: For how many ended answers the length is kept.
_LENGTHS = 256
#: With fewer lengths than this no usual length is known.
_FEW_LENGTHS = 8
#: Weight of all earlier prompts when a new one is added: about the last fifty count.
_FADE = 0.98
#: A line is fitted only if the lengths of prompts vary by this share of their mean.
_SPREAD = 0.25
#: The rate that is assumed where the time does not grow with the length at all.
_FASTEST_TOKENS_PER_S = 1e9


@dataclass
class PrefillLine:
    """The line `seconds = fixed + tokens / rate` through fading measurements: least squares."""

    _weight: float = 0.0
    _tokens: float = 0.0
    _seconds: float = 0.0
    _tokens_squared: float = 0.0
    _products: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self._weight = self._weight * _FADE + 1.0
        self._tokens = self._tokens * _FADE + tokens
        self._seconds = self._seconds * _FADE + seconds
        self._tokens_squared = self._tokens_squared * _FADE + tokens * tokens
        self._products = self._products * _FADE + tokens * seconds

    def fit(self) -> tuple[float, float] | None:
        """Fixed seconds, and tokens per second; None before the first prompt with tokens.

        With prompts of about one length all time counts as growing with it.
        """
        if self._tokens <= 0 or self._seconds <= 0:
            return None
        mean_tokens, mean_s = self._tokens / self._weight, self._seconds / self._weight
        slope = mean_s / mean_tokens
        variance = self._tokens_squared / self._weight - mean_tokens**2
        if variance > (_SPREAD * mean_tokens) ** 2:
            covariance = self._products / self._weight - mean_tokens * mean_s
            slope = min(max(covariance / variance, 0.0), slope)
        fixed_s = max(mean_s - slope * mean_tokens, 0.0)
        return fixed_s, min(1 / slope, _FASTEST_TOKENS_PER_S) if slope else _FASTEST_TOKENS_PER_S


@dataclass
class RequestPace:
    """The measurements of all workers together: another worker is to serve the request."""

    _token_s: FadingMean = field(default_factory=FadingMean)
    _prefill: PrefillLine = field(default_factory=PrefillLine)
    _lengths: deque[int] = field(default_factory=lambda: deque[int](maxlen=_LENGTHS))

    def first(self, uncached_tokens: int, took_s: float) -> None:
        """A first token came `took_s` after its request was submitted."""
        if took_s > 0:
            self._prefill.add(uncached_tokens, took_s)

    def ended(self, output_tokens: int, decoded_tokens: int, took_s: float) -> None:
        """An answer is complete. decoded_tokens: those after its first one, in `took_s`."""
        self._lengths.append(output_tokens)
        if decoded_tokens > 0:
            self._token_s.add(took_s, decoded_tokens)

    @property
    def pace(self) -> Pace:
        lengths = sorted(self._lengths)
        fixed_s, tokens_per_s = self._prefill.fit() or (0.0, None)
        return Pace(
            token_s=self._token_s.value,
            prefill_tokens_per_s=tokens_per_s,
            prefill_fixed_s=fixed_s,
            output_tokens=lengths[9 * len(lengths) // 10] if len(lengths) >= _FEW_LENGTHS else None,
        )
