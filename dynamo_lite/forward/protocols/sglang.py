"""SGLang's bootstrap: both engines get the same body at once, and meet in a room.

Source: sgl-project/sglang, `sgl-model-gateway/src/routers/http/pd_router.rs`, `pd_types.rs`.
"""

from typing import Any

from dynamo_lite.forward.protocols.base import (
    CHAT,
    COMPLETIONS,
    SGLANG_GENERATE,
    Body,
    ForwardProtocol,
    HandoverAttempt,
    Leg,
)


def _leg(body: Body, attempt: HandoverAttempt) -> Leg:
    """One room for each sequence: two that share a live room crash or hang both engines."""
    peer, rooms = attempt.prefill, attempt.rooms
    fields: dict[str, Any] = {
        "bootstrap_host": [peer.host] * len(rooms),
        "bootstrap_port": [peer.port] * len(rooms),
        "bootstrap_room": list(rooms),
    }
    if len(rooms) == 1:
        fields = {name: values[0] for name, values in fields.items()}
    return Leg({**body, **fields}, attempt.decode_headers)


BOOTSTRAP = ForwardProtocol(
    name="sglang",
    order="parallel",
    routes=frozenset({CHAT, COMPLETIONS, SGLANG_GENERATE}),
    default_port=8998,
    prefill=_leg,
    decode=lambda body, attempt, _: _leg(body, attempt),
    # An engine in disaggregation mode `decode` has no prefill at all.
    decodes_alone=False,
    batches=True,
)
