"""How fast prompts are prefilled, locally and remotely, as a decode engine measures it."""

from collections.abc import Mapping

from dynamo_lite.disagg.decode.remote_prefill import RemotePrefill
from dynamo_lite.disagg.decode.remote_prefills import RemotePrefills
from dynamo_lite.disagg.decode.stages import stages_s
from dynamo_lite.policy.fading_mean import FadingMean

#: Prompts with fewer tokens are left out: their time is mostly the fixed cost of a step.
_FEWEST_TOKENS = 32


class PrefillRate:
    """Runs on the engine's thread; `now` is monotonic.

    overlapping_steps: how many steps may be in flight, including the one being scheduled.
    """

    def __init__(self, prefills: RemotePrefills, overlapping_steps: int):
        self._prefills, self._overlapping = prefills, overlapping_steps
        self._local, self._fixed = FadingMean(), FadingMean()
        prefills.on_resumed.add(self.add_remote)

    def local_s(self, tokens: int) -> float | None:
        """Estimated seconds of a local prefill of `tokens` uncached tokens, beside all other work
        of this engine; None: not measured yet."""
        rate = self._local.value
        return None if rate is None else tokens / rate

    @property
    def remote_fixed_s(self) -> float | None:
        """The time of a remote prefill that does not depend on its length: all but the time from
        the claim to the last block. None: not measured yet."""
        return self._fixed.value

    def step(self, scheduled: Mapping[str, int], now: float) -> None:
        """A step is scheduled. scheduled: how many tokens it computes, by request."""
        computing = self._prefills.computing
        for request_id, prefill in list(computing.items()) if computing else ():
            if prefill.left_tokens > 0:
                prefill.left_tokens -= scheduled.get(request_id, 0)
            elif prefill.steps_since < self._overlapping - 1:
                prefill.steps_since += 1
            else:
                self._add_local(prefill, now)

    def finished(self, prefill: RemotePrefill, now: float) -> None:
        """The request has ended. An aborted prompt is not measured."""
        if prefill.request_id in self._prefills.computing:
            if prefill.left_tokens <= 0:
                self._add_local(prefill, now)
            else:
                self._prefills.computed(prefill, None)

    def add_remote(self, prefill: RemotePrefill) -> None:
        """A remote prefill has delivered its KV, and its prompt was scheduled."""
        stages = stages_s(prefill)
        fill_s = stages.get("fill", 0.0)
        if prefill.decided.inputs.uncached_tokens >= _FEWEST_TOKENS and fill_s > 0:
            self._fixed.add(sum(stages.values()) - fill_s, 1.0)

    def _add_local(self, prefill: RemotePrefill, now: float) -> None:
        took_s, tokens = now - prefill.here_at, prefill.here_tokens
        self._prefills.computed(prefill, took_s)
        if tokens >= _FEWEST_TOKENS and took_s > 0:
            self._local.add(tokens, took_s)
