"""Local or remote, for each prompt: the policy on what this engine knows right now."""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from dynamo_lite.disagg.counters import Counters
from dynamo_lite.disagg.decode.control_session import ControlSession
from dynamo_lite.disagg.decode.deadline import time_left_s
from dynamo_lite.disagg.decode.live_thresholds import EffectiveThresholds, LiveThresholds
from dynamo_lite.disagg.decode.single_flight import SingleFlight
from dynamo_lite.disagg.engine_api import Prompt
from dynamo_lite.disagg.span_notes import note_child
from dynamo_lite.policy.disagg import DecisionReason, Local, QueueView, Remote, Verdict, decide
from dynamo_lite.protocol.trace import TraceContext


class Decided(NamedTuple):
    """A verdict, and all that it was made from.

    at: monotonic. queue: None when it was not known. tuned: the thresholds.
    """

    verdict: Verdict
    at: float
    cached_tokens: int
    queue: QueueView | None
    tuned: EffectiveThresholds


class Decider:
    """Runs on the engine's thread. now: monotonic."""

    def __init__(
        self,
        net: ControlSession,
        tuning: LiveThresholds,
        flights: SingleFlight,
        now: Callable[[], float],
    ):
        self._net, self._tuning, self._flights, self._now = net, tuning, flights, now
        self._asked_at: deque[float] = deque()

    def decide(
        self, request: Prompt, cached: int, transferable: bool, left_s: float | None = None
    ) -> Decided:
        """See `DecodeScheduler.num_new_matched_tokens`. left_s: for its remote
        prefills, where that is not for its thresholds to say; its own time limits them too."""
        at, tuned = self._now(), self._tuning.now
        queue = self._queue_view(request.num_prompt_tokens - cached, request.priority)
        if not transferable or request.prompt_token_ids is None:
            verdict = Local(DecisionReason.NOT_TRANSFERABLE)
        elif self._net.leaving:
            verdict = Local(DecisionReason.LEAVING)
        else:
            verdict = decide(
                prompt_tokens=request.num_prompt_tokens,
                cached_tokens=cached,
                queue=queue,
                thresholds=tuned.options,
                now=at,
                time_left_s=min(
                    tuned.options.remote_prefill_timeout_s if left_s is None else left_s,
                    time_left_s(request, at),
                ),
            )
        if verdict.reason is DecisionReason.CACHED and self._flights.served(request.request_id):
            verdict = Local(DecisionReason.SINGLE_FLIGHT)
        return Decided(verdict, at, cached, queue, tuned)

    def asked(self, now: float) -> None:
        """This engine has asked for a remote prefill."""
        self._asked_at.append(now)

    def _queue_view(self, tokens: int, priority: int) -> QueueView | None:
        """The last reading, plus what this engine has asked for since; or what all have asked
        for, where that is more."""
        view = self._net.view
        if view is None:
            return None
        while self._asked_at and self._asked_at[0] <= view.read_at:
            self._asked_at.popleft()
        view = replace(view, jobs=view.jobs + len(self._asked_at))
        return self._net.demand.view(view, tokens, priority)


def note_decision(
    stats: Counters, above: TraceContext, request: Prompt, decided: Decided, now: float
) -> None:
    """What was decided about a prompt, from what; it holds since `now`."""
    verdict = decided.verdict
    attributes: dict[str, str | int] = {
        "dynamo_lite.verdict": "remote" if isinstance(verdict, Remote) else "local",
        "dynamo_lite.reason": verdict.reason.value,
        "dynamo_lite.prompt_tokens": request.num_prompt_tokens,
        "dynamo_lite.cached_tokens": decided.cached_tokens,
    }
    if decided.queue is not None:
        attributes["dynamo_lite.queue_jobs"] = decided.queue.jobs
    note_child(stats, "decision", above, decided.at, now, attributes)
