"""Llumnix' KVT connector: batch (the decode engine asks the prefill engine itself) and staged.

Source: llumnix-project/llumnix, `pkg/gateway/forwarder/`.
"""

from typing import Any

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


def _where(attempt: HandoverAttempt) -> dict[str, Any]:
    return {"remote_host": attempt.prefill.host, "remote_port": attempt.prefill.port}


def _with_params(body: Body, attempt: HandoverAttempt, params: dict[str, Any]) -> Leg:
    """Both legs have the same request id, because only the id identifies the prefill leg."""
    return Leg({**body, "kv_transfer_params": params}, {"x-request-id": attempt.request_id})


def _batch_decode(body: Body, attempt: HandoverAttempt, handoff: object) -> Leg:
    return _with_params(body, attempt, _where(attempt))


def _staged_decode(body: Body, attempt: HandoverAttempt, handoff: object) -> Leg:
    return _with_params(body, attempt, {**_where(attempt), "do_remote_prefill": True})


BATCH = ForwardProtocol(
    name="kvt-batch",
    order="single",
    routes=frozenset({COMPLETIONS}),
    port_offset=_PORT_OFFSET,
    prefill=_prefill,
    decode=_batch_decode,
)

STAGED = ForwardProtocol(
    name="kvt-staged",
    order="serial",
    routes=frozenset({COMPLETIONS}),
    port_offset=_PORT_OFFSET,
    prefill=_prefill,
    # The decode leg needs only that the prefill leg has ended.
    extract=lambda answer: True,
    decode=_staged_decode,
    staged=True,
)
