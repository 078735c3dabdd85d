"""The decisions that a decode engine has made lately, and their outcomes.

An entry is the record of a prompt; it becomes a message when `explain` asks for it.
"""

import threading
from collections import deque
from collections.abc import Callable

import msgspec

from dynamo_lite.disagg.decode.remote_prefill import RemotePrefill, stages_s
from dynamo_lite.disagg.engine_config import EngineConfig
from dynamo_lite.disagg.request_ids import is_of
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.decisions import (
    Asked,
    Decision,
    Explained,
    decode_explain,
)

#: How many decisions an engine remembers, and how old those are that it tells.
MOST, LONGEST_S = 4096, 900.0


class DecisionLog:
    """now: monotonic."""

    def __init__(self, config: EngineConfig, now: Callable[[], float]):
        self._config, self._now = config, now
        self._lock = threading.Lock()
        self._kept: deque[RemotePrefill] = deque(maxlen=MOST)

    def append(self, prefill: RemotePrefill) -> None:
        """Adds the final decision about a prompt."""
        with self._lock:
            self._kept.append(prefill)

    def answer(self, payload: bytes) -> bytes:
        """The reply to an `Explain`, on any thread. Raises ProtocolError."""
        wanted, now = decode_explain(payload), self._now()
        oldest = now - min(wanted.within_s, LONGEST_S)
        with self._lock:
            kept = list(self._kept)
        found = [
            prefill
            for prefill in kept
            if prefill.decided.at >= oldest
            and (not wanted.request_id or is_of(prefill.request_id, wanted.request_id))
        ]
        found = found[-wanted.last :] if wanted.last else []
        return encode(
            Explained(
                engine_id=self._config.engine_id,
                lease_id=self._config.lease_id,
                decisions=[_as_message(prefill, now) for prefill in found],
            )
        )


def _as_message(prefill: RemotePrefill, now: float) -> Decision:
    decided, outcome = prefill.decided, prefill.outcome
    return Decision(
        **msgspec.structs.asdict(decided.inputs),
        request_id=prefill.request_id,
        age_s=now - decided.at,
        verdict=decided.reason.verdict,
        reason=decided.reason.value,
        thresholds=decided.options,
        asked=Asked(
            attempt=prefill.attempt,
            outcome="" if outcome is None else outcome.value,
            stages_s={} if outcome is None else stages_s(prefill),
            detail=prefill.detail,
        )
        if prefill.attempt
        else None,
    )
