"""How long the steps of this engine take, learned from its own steps.

    t = th0 + th1 p + th2 a + th3 d + th4 K

p: prefill tokens of the step. a: their attention work, `p_i (context_i + p_i / 2)` summed over the
prompts. d: decoding sequences. K: KV tokens that these have. It is the model of
`capacity/timing.py`.
"""

from typing import NamedTuple

from dynamo_lite.policy.decision.least_squares import LeastSquares

#: Weight of all earlier steps of a kind (with prompts, or without) when a new one is added.
_FORGETTING = 0.998
_DECODES, _PREFILLS = 0, 1


class StepLoad(NamedTuple):
    """What one step computes."""

    prefill_tokens: int = 0
    attention: float = 0.0
    streams: int = 0
    kv_tokens: int = 0


class PromptWork(NamedTuple):
    """Prompt tokens to compute, and their attention work."""

    tokens: int = 0
    attention: float = 0.0

    def __add__(self, other: "PromptWork") -> "PromptWork":  # pyright: ignore[reportIncompatibleMethodOverride]
        return PromptWork(self.tokens + other.tokens, self.attention + other.attention)


def work_of(tokens: int, context: int) -> PromptWork:
    """The work of `tokens` tokens after `context` others."""
    return PromptWork(tokens, tokens * (context + tokens / 2))


class StepTime:
    """The fit. Steps with prompts and steps without are forgotten apart from each other: while all
    prompts are prefilled elsewhere, the cost of computing them is not forgotten."""

    def __init__(self) -> None:
        self.fit = LeastSquares(5, forgetting=_FORGETTING, kinds=2)

    def add(self, load: StepLoad, seconds: float, now: float, steps: float = 1.0) -> None:
        """A step, or the mean of several. now: monotonic seconds."""
        row = (1.0, load.prefill_tokens, load.attention, load.streams, load.kv_tokens)
        kind = _PREFILLS if load.prefill_tokens else _DECODES
        self.fit.add(row, seconds, now, kind=kind, weight=steps)

    @property
    def prefills(self) -> float:
        """Effective number of measured steps with prompts."""
        return self.fit.count(_PREFILLS)

    @property
    def newest_prefill_at(self) -> float:
        return self.fit.newest_at(_PREFILLS)

    def decode_s(self, load: StepLoad) -> float:
        """Seconds of a step with the decoding sequences of `load`, and no prompt."""
        fixed, _, _, stream, kv = self.fit.coefficients
        seconds = fixed + stream * load.streams + kv * load.kv_tokens
        return seconds * self.fit.mean_ratio(_DECODES)

    def work_s(self, work: PromptWork) -> float:
        """Seconds that these tokens add to the steps that compute them."""
        _, token, attention, _, _ = self.fit.coefficients
        seconds = token * work.tokens + attention * work.attention
        return seconds * self.fit.mean_ratio(_PREFILLS)

    def pause_s(self, load: StepLoad, seconds: float) -> float:
        """By how much the prompts of a step made it longer."""
        return max(0.0, seconds - self.decode_s(load))
