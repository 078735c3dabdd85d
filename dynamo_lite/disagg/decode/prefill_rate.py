"""How fast prompts are prefilled, here and elsewhere, as a decode engine sees it."""

from collections.abc import Mapping
from dataclasses import dataclass

from dynamo_lite.policy.cost import FadingMean, Rates

#: Shorter ones measure the price of a step.
_FEWEST_TOKENS = 32


@dataclass
class _Computing:
    """steps: that must be scheduled until the one with its last token has ended."""

    tokens: int
    left: int
    began: float
    steps: int


class PrefillRate:
    """Runs on the engine's thread; `now` is monotonic.

    overlapping_steps: how many may be under way at a time. rates: replaced as a whole.
    """

    def __init__(self, overlapping_steps: int):
        self._overlapping = overlapping_steps
        self._computing: dict[str, _Computing] = {}
        self._local, self._remote, self._fixed = FadingMean(), FadingMean(), FadingMean()
        self.rates = Rates()

    @property
    def idle(self) -> bool:
        return not self._computing

    def computes(self, request_id: str, tokens: int, now: float) -> None:
        """The step that is being scheduled begins to compute so many tokens of a prompt."""
        self._computing[request_id] = _Computing(tokens, tokens, now, self._overlapping)

    def step(self, scheduled: Mapping[str, int], now: float) -> list[tuple[str, float]]:
        """A step computes so many tokens of each request. Returns prompts that are done."""
        done: list[tuple[str, float]] = []
        for request_id, computing in list(self._computing.items()):
            if computing.left > 0:
                computing.left -= scheduled.get(request_id, 0)
            elif computing.steps > 1:
                computing.steps -= 1
            else:
                done.append((request_id, self._end(request_id, now)))
        return done

    def finished(self, request_id: str, now: float) -> float | None:
        """The request is over. Returns how long its prompt took, if that was unknown yet."""
        computing = self._computing.get(request_id)
        if computing is None:
            return None
        if computing.left <= 0:
            return self._end(request_id, now)
        del self._computing[request_id]  # it was aborted
        return None

    def brought(self, tokens: int, fill_s: float, fixed_s: float) -> None:
        """A remote prefill brought the KV of so many tokens; see `Rates`."""
        if tokens >= _FEWEST_TOKENS and fill_s > 0:
            self._remote.add(tokens, fill_s)
            self._fixed.add(fixed_s, 1.0)
            self._show()

    def _end(self, request_id: str, now: float) -> float:
        computing = self._computing.pop(request_id)
        took_s = now - computing.began
        if computing.tokens >= _FEWEST_TOKENS and took_s > 0:
            self._local.add(computing.tokens, took_s)
            self._show()
        return took_s

    def _show(self) -> None:
        self.rates = Rates(self._local.value, self._remote.value, self._fixed.value)
