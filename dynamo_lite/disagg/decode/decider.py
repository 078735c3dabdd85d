"""Decides local or remote for each prompt, from the present state of queue and workers."""

from collections.abc import Callable
from dataclasses import replace

from dynamo_lite.disagg.decode.control_session import ControlSession
from dynamo_lite.disagg.decode.live_thresholds import LiveThresholds
from dynamo_lite.disagg.decode.measurements import Measurements
from dynamo_lite.disagg.decode.remote_prefill import Decided, RemotePrefill
from dynamo_lite.disagg.decode.remote_prefills import RemotePrefills
from dynamo_lite.disagg.engine_api import Prompt
from dynamo_lite.disagg.transfer_params import time_left_s
from dynamo_lite.policy.decision.disagg import DecisionReason, Local, QueueView, decide


class Decider:
    """Runs on the engine's thread. now: monotonic."""

    def __init__(
        self,
        net: ControlSession,
        live: LiveThresholds,
        prefills: RemotePrefills,
        measured: Measurements,
        now: Callable[[], float],
    ):
        self._net, self._live, self._prefills = net, live, prefills
        self._measured, self._now = measured, now

    def decide(
        self, request: Prompt, cached: int, transferable: bool, known: RemotePrefill | None
    ) -> Decided:
        """See `DecodeScheduler.num_new_matched_tokens`.

        known: the prompt's record so far. If the prompt has had a remote prefill before, the
        time limit of that one applies. The request's own deadline always applies.
        """
        at, effective = self._now(), self._live.now
        timeout_s = effective.options.remote_prefill_timeout_s
        if known is not None and known.until is not None:
            timeout_s = known.until - at
        queue = self._queue_view(request.num_prompt_tokens - cached, request.priority)
        usual = opinion = None
        propensity = 1.0
        if not transferable or request.prompt_token_ids is None:
            verdict = Local(DecisionReason.NOT_TRANSFERABLE)
        elif self._net.leaving:
            verdict = Local(DecisionReason.LEAVING)
        else:
            left_s = min(timeout_s, time_left_s(request, at))
            usual = decide(
                prompt_tokens=request.num_prompt_tokens,
                cached_tokens=cached,
                queue=queue,
                thresholds=effective.options,
                now=at,
                time_left_s=left_s,
            )
            if usual.reason is DecisionReason.CACHED and _was_served(known):
                usual = Local(DecisionReason.SINGLE_FLIGHT)
            verdict, opinion, propensity = self._measured.costs.decide(
                request.request_id,
                request.num_prompt_tokens - cached,
                cached,
                usual,
                queue,
                effective.options,
                at,
                left_s,
            )
        rates = self._measured.rate.rates
        return Decided(
            verdict, at, cached, queue, effective, rates, usual, opinion, propensity=propensity
        )

    def _queue_view(self, tokens: int, priority: int) -> QueueView | None:
        """The last reading plus the jobs that this engine has added since, or the jobs of all
        engines if those are more."""
        view = self._net.queue_watch.view
        if view is None:
            return None
        view = replace(view, jobs=view.jobs + self._prefills.asked_since(view.read_at))
        return self._net.backlog.view(view, tokens, priority)


def _was_served(known: RemotePrefill | None) -> bool:
    """Whether the prompt's prefix is cached because it waited for another request's."""
    return known is not None and known.wait is not None and known.wait.served
