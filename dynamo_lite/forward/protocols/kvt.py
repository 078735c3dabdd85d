"""Llumnix' KVT connector: batch (the decode engine asks the prefill engine itself) and staged.

Source: llumnix-project/llumnix, `pkg/gateway/forwarder/`.
"""

from dynamo_lite.forward.protocols.base import (
    COMPLETIONS,
    Body,
    ForwardProtocol,
    HandoverAttempt,
    Leg,
)
from dynamo_lite.forward.protocols.one_token import one_token

#: The resolver's default: KVT listens at the HTTP port plus this.
_PORT_OFFSET = 20_000


def _prefill(body: Body, attempt: HandoverAttempt) -> Leg:
    """Not streamed, unlike Llumnix' own leg: only the end of the answer matters."""
    one = one_token(body, attempt.route)
    one["kv_transfer_params"] = {"do_remote_decode": True}
    return Leg(one, {"x-request-id": attempt.request_id})


def _decode(body: Body, attempt: HandoverAttempt, **more: bool) -> Leg:
    """Both legs have the same request id, because only the id identifies the prefill leg."""
    peer = attempt.prefill
    params = {"remote_host": peer.host, "remote_port": peer.port, **more}
    return Leg({**body, "kv_transfer_params": params}, {"x-request-id": attempt.request_id})


BATCH = ForwardProtocol(
    name="kvt-batch",
    order="single",
    routes=frozenset({COMPLETIONS}),
    port_offset=_PORT_OFFSET,
    prefill=_prefill,
    decode=lambda body, attempt, _: _decode(body, attempt),
)

STAGED = ForwardProtocol(
    name="kvt-staged",
    order="serial",
    routes=frozenset({COMPLETIONS}),
    port_offset=_PORT_OFFSET,
    prefill=_prefill,
    # The decode leg needs only that the prefill leg has ended.
    extract=lambda params: True,
    decode=lambda body, attempt, _: _decode(body, attempt, do_remote_prefill=True),
    staged=True,
)
