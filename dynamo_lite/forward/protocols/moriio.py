"""vLLM's MoRIIOConnector for AMD GPUs: READ is serial, WRITE sends both legs at once.

Both engines take the other one's address from the request id. Source: vLLM 0.32,
`moriio/moriio_common.py`, `moriio_connector.py`; vLLM's `moriio_toy_proxy_server.py`.
"""

from typing import Any

from dynamo_lite.forward.protocols.base import (
    MIN_TOKENS_ROUTES,
    VLLM_ROUTES,
    Body,
    ForwardProtocol,
    HandoverAttempt,
    Leg,
    Params,
    Peer,
)
from dynamo_lite.forward.protocols.one_token import object_of, one_token

#: Of the handshake; the configuration's `transfer-port` replaces it.
_HANDSHAKE_PORT = 6301
_NOTIFY_PORT = 61005


def _zmq(peer: Peer) -> str:
    notify = peer.notify_port or _NOTIFY_PORT
    return f"host:{peer.host},handshake:{peer.port},notify:{notify}"


def _leg(body: Body, attempt: HandoverAttempt, params: dict[str, Any]) -> Leg:
    addresses = f"___prefill_addr_{_zmq(attempt.prefill)}___decode_addr_{_zmq(attempt.decode)}"
    request_id = f"{addresses}_{attempt.unique}"
    body = {**body, "kv_transfer_params": params}
    return Leg(body, {"x-request-id": request_id}, (request_id, attempt.unique))


def _address(peer: Peer, attempt: HandoverAttempt) -> dict[str, Any]:
    """The other engine, as the toy proxy names it. None: to be found by the handshake."""
    return {
        "transfer_id": f"tx-{attempt.unique}",
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": peer.host,
        "remote_port": peer.port,
        "remote_handshake_port": peer.port,
        "remote_notify_port": peer.notify_port or _NOTIFY_PORT,
        "remote_dp_size": 1,
    }


def _prefill(body: Body, attempt: HandoverAttempt) -> Leg:
    decode = _address(attempt.decode, attempt)
    params = {**decode, "do_remote_decode": True, "do_remote_prefill": False}
    return _leg(one_token(body, attempt.route), attempt, params)


def _returned(raw: Params) -> Any:
    params = object_of(raw)
    keys = ("remote_engine_id", "remote_block_ids")
    if params is None or any(params.get(key) is None for key in keys):
        return None
    return params


def _decode(body: Body, attempt: HandoverAttempt, handoff: Any) -> Leg:
    params = _address(attempt.prefill, attempt)
    if handoff is not None:
        params |= handoff
    params |= {"do_remote_decode": False, "do_remote_prefill": True}
    return _leg(body, attempt, params)


READ = ForwardProtocol(
    name="moriio-read",
    order="serial",
    routes=VLLM_ROUTES,
    default_port=_HANDSHAKE_PORT,
    prefill=_prefill,
    extract=_returned,
    decode=_decode,
    names_decode=True,
)

WRITE = ForwardProtocol(
    name="moriio-write",
    order="parallel",
    routes=MIN_TOKENS_ROUTES,
    default_port=_HANDSHAKE_PORT,
    prefill=_prefill,
    decode=_decode,
)
