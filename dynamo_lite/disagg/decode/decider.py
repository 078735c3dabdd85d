"""Decides local or remote for each prompt, from the present state of queue and workers."""

from collections.abc import Callable

from dynamo_lite.disagg.decision.rule import decide
from dynamo_lite.disagg.decode.control_session import ControlSession
from dynamo_lite.disagg.decode.live_thresholds import LiveThresholds
from dynamo_lite.disagg.decode.remote_prefill import Decided, RemotePrefill
from dynamo_lite.disagg.decode.remote_prefills import RemotePrefills
from dynamo_lite.disagg.engine_api import Prompt
from dynamo_lite.disagg.transfer_params import time_left_s
from dynamo_lite.protocol.decisions import DecisionInputs, QueueSeen


class Decider:
    """Runs on the engine's thread. now: monotonic."""

    def __init__(
        self,
        net: ControlSession,
        live: LiveThresholds,
        prefills: RemotePrefills,
        now: Callable[[], float],
    ):
        self._net, self._live, self._prefills, self._now = net, live, prefills, now

    def decide(
        self, request: Prompt, cached: int, transferable: bool, known: RemotePrefill | None
    ) -> Decided:
        """See `DecodeScheduler.num_new_matched_tokens`.

        known: the prompt's record so far. If the prompt has had a remote prefill before, the
        time limit of that one applies. The request's own deadline always applies.
        """
        at, options = self._now(), self._live.now
        timeout_s = options.remote_prefill_timeout_s
        if known is not None and known.until is not None:
            timeout_s = known.until - at
        inputs = DecisionInputs(
            prompt_tokens=request.num_prompt_tokens,
            cached_tokens=cached,
            queue=self._queue(at),
            time_left_s=min(timeout_s, time_left_s(request, at)),
            transferable=transferable and request.prompt_token_ids is not None,
            leaving=self._net.leaving,
            prefix_awaited=known is not None and known.wait is not None and known.wait.served,
        )
        return Decided(decide(inputs, options), at, inputs, options)

    def _queue(self, now: float) -> QueueSeen | None:
        """The last reading plus what this engine has asked for since; no less than what it waits
        for."""
        view = self._net.queue_watch.view
        if view is None:
            return None
        jobs, tokens = self._prefills.asked_since(view.read_at)
        return QueueSeen(
            jobs=max(view.jobs + jobs, self._prefills.jobs),
            tokens=max(view.tokens + tokens, self._prefills.tokens),
            prefill_workers=view.prefill_workers,
            age_s=max(now - view.read_at, 0.0),
            prefill_workers_alive=view.prefill_workers_alive,
        )
