"""What a decode engine has decided lately, and what came of it.

A decision is one short entry; it is put into words when somebody asks.
"""

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from dynamo_lite.disagg.decode.decider import Decided
from dynamo_lite.disagg.decode.prefill_rate import PrefillRate
from dynamo_lite.disagg.engine_api import Prompt
from dynamo_lite.disagg.engine_config import EngineConfig
from dynamo_lite.engine.request_ids import is_of
from dynamo_lite.policy.cost import Rates
from dynamo_lite.policy.disagg import Remote
from dynamo_lite.policy.instructions import Outcome
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.decisions import (
    Asked,
    Decision,
    Explained,
    Followed,
    QueueSeen,
    decode_explain,
)
from dynamo_lite.runtime.clock import Clock

#: How many decisions an engine remembers, and how long.
MOST, LONGEST_S = 4096, 900.0


@dataclass(slots=True)
class _Entry:
    """rates: as they were known. outcome, stages_s, detail: of its remote prefill."""

    request_id: str
    prompt_tokens: int
    decided: Decided
    rates: Rates
    attempt: str = ""
    outcome: str = ""
    detail: str = ""
    stages_s: Mapping[str, float] | None = None
    computed_s: float | None = None


class DecisionLog:
    """Runs on the engine's thread, but for `answer`.

    overlapping_steps: see `PrefillRate`.
    """

    def __init__(self, link: EngineConfig, overlapping_steps: int, clock: Clock):
        self._link, self._now = link, clock.monotonic
        self._pace = PrefillRate(overlapping_steps)
        self._lock = threading.Lock()
        self._kept: deque[_Entry] = deque(maxlen=MOST)
        self._open: dict[str, _Entry] = {}  # of requests that have not ended

    @property
    def idle(self) -> bool:
        return not self._open and self._pace.idle

    def decided(self, request: Prompt, decided: Decided) -> None:
        """The engine does what was decided, in the step that is being scheduled."""
        entry = _Entry(request.request_id, request.num_prompt_tokens, decided, self._pace.rates)
        self._open[request.request_id] = entry
        oldest = decided.at - LONGEST_S
        with self._lock:
            self._kept.append(entry)
            while self._kept[0].decided.at < oldest:
                self._kept.popleft()
        if not isinstance(decided.verdict, Remote):
            tokens = request.num_prompt_tokens - decided.cached_tokens
            self._pace.computes(request.request_id, tokens, decided.at)

    def asked(self, request_id: str, attempt: str) -> None:
        self._open[request_id].attempt = attempt

    def ended(
        self,
        request_id: str,
        attempt: str,
        outcome: Outcome,
        stages_s: Mapping[str, float],
        detail: str = "",
    ) -> None:
        """A remote prefill is over. detail: see `Ended`."""
        entry = self._open.get(request_id)
        if entry is not None and entry.attempt == attempt:
            entry.outcome, entry.stages_s, entry.detail = outcome.value, stages_s, detail

    def resumed(self, request_id: str, seconds: float) -> None:
        """The engine goes on with a request, so long after its KV came."""
        entry = self._open.get(request_id)
        if entry is None or entry.stages_s is None:
            return
        entry.stages_s = stages_s = {**entry.stages_s, "resume": seconds}
        fill_s = stages_s.get("fill", 0.0)
        tokens = entry.prompt_tokens - entry.decided.cached_tokens
        self._pace.brought(tokens, fill_s, sum(stages_s.values()) - fill_s)

    def step(self, scheduled: Mapping[str, int]) -> None:
        """A step computes so many tokens of each request."""
        if not self._pace.idle:
            for request_id, took_s in self._pace.step(scheduled, self._now()):
                self._open[request_id].computed_s = took_s

    def finished(self, request_id: str) -> None:
        entry = self._open.pop(request_id, None)
        if entry is not None and (took_s := self._pace.finished(request_id, self._now())):
            entry.computed_s = took_s

    def answer(self, payload: bytes) -> bytes:
        """To an `Explain`, on any thread. Raises ProtocolError."""
        wanted, now = decode_explain(payload), self._now()
        oldest = now - min(wanted.within_s, LONGEST_S)
        with self._lock:
            kept = list(self._kept)
        found = [
            entry
            for entry in kept
            if entry.decided.at >= oldest
            and (not wanted.request_id or is_of(entry.request_id, wanted.request_id))
        ]
        found = found[-wanted.last :] if wanted.last else []
        return encode(
            Explained(
                engine_id=self._link.engine_id,
                lease_id=self._link.lease_id,
                decisions=[_in_words(entry, now) for entry in found],
            )
        )


def _in_words(entry: _Entry, now: float) -> Decision:
    verdict, at, cached, queue, tuned = entry.decided
    uncached, rates = entry.prompt_tokens - cached, entry.rates
    return Decision(
        request_id=entry.request_id,
        age_s=now - at,
        prompt_tokens=entry.prompt_tokens,
        cached_tokens=cached,
        verdict="remote" if isinstance(verdict, Remote) else "local",
        reason=verdict.reason.value,
        queue=queue
        and QueueSeen(
            jobs=queue.jobs,
            prefill_workers=queue.prefill_workers,
            age_s=at - queue.read_at,
            tokens=queue.tokens,
            wait_s=queue.wait_s,
            takes_s=queue.takes_s,
            prefill_workers_alive=queue.prefill_workers_alive,
        ),
        thresholds=Followed.of(tuned.version, tuned.options),
        local_s=rates.local_s(uncached),
        remote_s=rates.remote_s(uncached),
        local_tokens_per_s=rates.local_tokens_per_s,
        remote_tokens_per_s=rates.remote_tokens_per_s,
        computed_s=entry.computed_s,
        asked=Asked(
            attempt=entry.attempt,
            outcome=entry.outcome,
            stages_s=dict(entry.stages_s or {}),
            detail=entry.detail,
        )
        if entry.attempt
        else None,
    )
