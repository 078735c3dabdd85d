"""What a decode engine tells of the decisions that it has made lately, and of their outcomes.

An entry is the record of a prompt; it becomes a message when `explain` asks for it.
"""

import re
from collections import deque

import msgspec

from dynamo_lite.disagg.decode.remote_prefill import RemotePrefill
from dynamo_lite.disagg.decode.reports import stages_s
from dynamo_lite.disagg.engine_config import EngineConfig
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.decisions import (
    Asked,
    Decision,
    Explained,
    decode_explain,
)

#: How many decisions an engine remembers, and how old those are that it tells.
MOST, LONGEST_S = 4096, 900.0
#: What is added to a client's id. In front: the number of a sequence (`n` > 1), and the route, if
#: the id is the client's X-Request-Id. Behind: the number of its prompt, eight random digits, and
#: the number of the worker that runs it.
_SIBLING, _ROUTE = re.compile(r"^\d+_"), re.compile(r"^(chat)?cmpl-")
_BEHIND = re.compile(r"(-\d+)?(-[0-9a-f]{8})?")


def explained(
    config: EngineConfig, decisions: deque[RemotePrefill], payload: bytes, now: float
) -> bytes:
    """The reply to an `Explain`, on any thread. Raises ProtocolError.

    decisions: the oldest one first. The engine's thread may append meanwhile: the copy is one call
    into C, which no other thread interrupts. now: monotonic.
    """
    wanted = decode_explain(payload)
    oldest = now - min(wanted.within_s, LONGEST_S)
    found = [
        prefill
        for prefill in decisions.copy()
        if prefill.decided.at >= oldest
        and (not wanted.request_id or is_of(prefill.request_id, wanted.request_id))
    ]
    found = found[-wanted.last :] if wanted.last else []
    return encode(
        Explained(
            engine_id=config.engine_id,
            lease_id=config.lease_id,
            decisions=[_as_message(prefill, now) for prefill in found],
        )
    )


def is_of(own: str, asked: str) -> bool:
    """Whether the engine's name `own` belongs to the request with the id `asked`.

    asked: the id of the answer, the client's X-Request-Id, or the id of a process between the
    client and the engine.
    """
    name = own.rpartition("#")[0] or own
    for text in (own, name, name.partition("~")[0]):
        one = _SIBLING.sub("", text)
        for start in (text, one, _ROUTE.sub("", one)):
            behind = start.removeprefix(asked)
            if start.startswith(asked) and _BEHIND.fullmatch(behind):
                return True
    return False


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
