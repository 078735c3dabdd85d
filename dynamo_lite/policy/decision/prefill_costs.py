"""What a prompt would cost here, and what at a prefill worker, in seconds of waiting.

One second that a stream pauses counts as one second that a first token is late. The formulas
are in `docs/cost-policy.md`. All of it is learned from this engine's own steps and remote prefills.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from dynamo_lite.policy.decision.cost import FadingMean
from dynamo_lite.policy.decision.disagg import QueueView
from dynamo_lite.policy.decision.least_squares import LeastSquares, RunningMedian
from dynamo_lite.policy.decision.step_time import PromptWork, StepLoad, StepTime, work_of

#: Weight of all earlier remote prefills when a new one is added.
_REMOTE_FORGETTING = 0.99
#: Measurements that are needed: steps with prompts, and remote prefills.
_FEWEST_LOCAL, _FEWEST_REMOTE = 10.0, 30.0
#: How old the newest one may be. This engine stays as it is for longer than prefill workers do.
_OLDEST_LOCAL_S, _OLDEST_REMOTE_S = 600.0, 60.0
#: How wrong the predictions may have been: median amount of log(actual / predicted).
_WORST_LOG_RATIO = 0.4
#: From this share of the KV memory in use on, memory that waits for KV costs something.
_FULL_KV = 0.8
#: Of the time of a remote prefill, what is left if the wait is predicted longer than all of it.
_LEAST_SHARE = 0.2
#: Time over which the rates of arriving jobs and prompts are measured.
_RATE_S = 10.0


class Costs(NamedTuple):
    """Predictions for one prompt, in seconds."""

    #: Here: until the first token, the pauses of all streams beside it, and the wait of the prompts
    #: that arrive before it is computed.
    local_s: float
    pause_s: float
    behind_s: float
    #: Elsewhere: until this engine's first step with the KV, the wait that jobs behind it get, and
    #: the work that the KV memory cannot do meanwhile.
    remote_s: float
    queue_s: float
    memory_s: float
    #: Of `remote_s`: because of other jobs.
    wait_s: float
    #: Standard deviation of the difference between the two sides.
    band_s: float
    #: What the remote side is learned from.
    remote_row: tuple[float, float, float, float]

    @property
    def here_s(self) -> float:
        return self.local_s + self.pause_s + self.behind_s

    @property
    def elsewhere_s(self) -> float:
        return self.remote_s + self.queue_s + self.memory_s


@dataclass(frozen=True, slots=True)
class EngineState:
    """What an engine is doing when a prompt is decided."""

    #: Of the last step.
    load: StepLoad
    #: Prompts that are computed here and come first.
    ahead: PromptWork
    #: Tokens of a step, `max-num-batched-tokens`.
    budget: int
    #: Memory, in tokens, and the share in use.
    kv_tokens: int
    kv_usage: float


class PrefillCosts:
    """The estimates of one engine. now: monotonic seconds."""

    def __init__(self) -> None:
        self.steps = StepTime()
        #: Remote prefills without their wait in the queue: a fixed time, and see `_remote_row`.
        self.remote = LeastSquares(4, forgetting=_REMOTE_FORGETTING)
        #: Amount of log(actual / predicted).
        self.local_error, self.remote_error = RunningMedian(0.2), RunningMedian(0.2)
        self._job_tokens = FadingMean()
        self._asked_tokens, self._asked_at, self._tokens_per_s = 0, -math.inf, 0.0
        self._local_rate = _EventRate(_RATE_S)

    def computes_here(self, now: float) -> None:
        """A prompt is going to be computed here, for whatever reason."""
        self._local_rate.add(now)

    def add_local(self, costs: Costs | None, took_s: float) -> None:
        """A prompt was computed here. costs: as they were predicted."""
        if costs is not None and costs.local_s > 0 and took_s > 0:
            self.local_error.add(abs(math.log(took_s / costs.local_s)))

    def add_remote(self, costs: Costs, tokens: int, took_s: float, now: float) -> None:
        """A remote prefill has delivered. tokens: that it computed. took_s: from the decision to
        the step that samples."""
        self._job_tokens.add(tokens, 1.0)
        self.remote.add(costs.remote_row, max(took_s - costs.wait_s, _LEAST_SHARE * took_s), now)
        if costs.remote_s > 0 and took_s > 0:
            self.remote_error.add(abs(math.log(took_s / costs.remote_s)))

    def unsure_of(self, now: float) -> str:
        """Why the predictions cannot be relied on; empty if they can."""
        if self.steps.prefills < _FEWEST_LOCAL:
            return "few_local"
        if self.remote.count() < _FEWEST_REMOTE:
            return "few_remote"
        if now - self.steps.newest_prefill_at > _OLDEST_LOCAL_S:
            return "old_local"
        if now - self.remote.newest_at() > _OLDEST_REMOTE_S:
            return "old_remote"
        if self.local_error.value > _WORST_LOG_RATIO:
            return "wrong_local"
        if self.remote_error.value > _WORST_LOG_RATIO:
            return "wrong_remote"
        return ""

    def of(
        self, uncached: int, cached: int, here: EngineState, queue: QueueView, now: float
    ) -> Costs:
        """The costs of a prompt. queue: must have prefill workers."""
        load, ahead, work = here.load, here.ahead, work_of(uncached, cached)
        streams = load.streams
        decode_s, work_s = self.steps.decode_s(load), self.steps.work_s(work)
        room = max(here.budget - streams, 1)
        steps = -(-(uncached + ahead.tokens) // room)
        local_s = steps * decode_s + self.steps.work_s(ahead) + work_s
        row = _remote_row(work, queue)
        each_s = _each_s(uncached, queue)
        wait_s = queue.earlier_tokens / uncached * each_s
        remote_s = wait_s + self.remote.predict(row) * self.remote.mean_ratio()
        rate = self._local_rate.per_s(now)
        # Of the difference, by the coefficients of a step. The work is in the time here, in the
        # pauses and, with the time before it, in the wait of those behind it.
        before, own = 1 + rate * work_s, 1 + streams + rate * local_s
        decodes = steps * before - 1
        gradient = (
            decodes,
            ahead.tokens * before + work.tokens * own,
            ahead.attention * before + work.attention * own,
            decodes * streams,
            decodes * load.kv_tokens,
        )
        variance = self.steps.fit.variance(gradient) + self.remote.variance(row)
        full = max(0.0, here.kv_usage - _FULL_KV) / (1 - _FULL_KV)
        return Costs(
            local_s=local_s,
            pause_s=streams * work_s,
            # Those that arrive while it is computed wait for half of its work on average.
            behind_s=rate * (local_s - work_s / 2) * work_s,
            remote_s=remote_s,
            queue_s=self._queue_s(uncached, queue, each_s, wait_s, now),
            memory_s=full * streams * min(uncached / here.kv_tokens, 1.0) * remote_s,
            wait_s=wait_s,
            band_s=math.sqrt(variance) if variance < math.inf else math.inf,
            remote_row=row,
        )

    def _queue_s(
        self, tokens: int, queue: QueueView, each_s: float, wait_s: float, now: float
    ) -> float:
        """The wait that jobs behind it get: those that are queued in later lanes, and those that
        arrive while it waits."""
        self._measure_rate(queue, now)
        mean = self._job_tokens.value
        if not mean:
            return 0.0
        later = queue.later_tokens / max(mean, tokens)
        return (later + self._tokens_per_s / mean * wait_s) * each_s

    def _measure_rate(self, queue: QueueView, now: float) -> None:
        since_s = now - self._asked_at
        if since_s < 0.1:
            return
        asked = max(queue.asked_tokens - self._asked_tokens, 0)
        if since_s < math.inf:
            old = math.exp(-since_s / _RATE_S)
            self._tokens_per_s = old * self._tokens_per_s + (1 - old) * asked / since_s
        self._asked_tokens, self._asked_at = queue.asked_tokens, now


class _EventRate:
    """Events per second, older ones fading with the time constant `over_s`."""

    def __init__(self, over_s: float) -> None:
        self._over_s = over_s
        self._weight, self._at = 0.0, -math.inf

    def add(self, now: float) -> None:
        self._weight, self._at = self._faded(now) + 1.0, now

    def per_s(self, now: float) -> float:
        return self._faded(now) / self._over_s

    def _faded(self, now: float) -> float:
        return self._weight * math.exp((self._at - now) / self._over_s)


def _each_s(tokens: int, queue: QueueView) -> float:
    """Seconds by which a job of `tokens` delays those behind it, at the measured rate."""
    if queue.takes_s is None or queue.wait_s is None:
        return 0.0
    return max(queue.takes_s - queue.wait_s, 0.0) / queue.prefill_workers


def _remote_row(work: PromptWork, queue: QueueView) -> tuple[float, float, float, float]:
    """A job's tokens and their attention work; per prefill worker the claimed tokens, which may
    share its worker."""
    workers = queue.prefill_workers
    return (
        1.0,
        work.tokens,
        work.attention,
        queue.claimed_tokens / workers,
    )
