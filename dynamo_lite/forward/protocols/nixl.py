"""vLLM's NixlConnector (the decode engine reads the KV) and NixlPushConnector (the prefill engine
writes it). Source: vLLM 0.32, `nixl/{pull,push}_scheduler.py`, `push_worker.py`.
"""

from collections.abc import Mapping
from typing import Any

from dynamo_lite.forward.protocols.base import (
    RESPONSES,
    VLLM_ROUTES,
    Body,
    ForwardProtocol,
    HandoverAttempt,
    Leg,
    Params,
)
from dynamo_lite.forward.protocols.one_token import object_of, one_token

#: Parameters of a prefill leg in both modes. The nulls are those of vLLM's own examples.
ASK_FOR_PREFILL: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
#: Parameters that a decode engine needs of a prefill engine that writes.
_IDENTITY = ("remote_engine_id", "remote_host", "remote_port", "tp_size")


def ask_for_prefill(body: Body, attempt: HandoverAttempt) -> Leg:
    one = one_token(body, attempt.route)
    one["kv_transfer_params"] = dict(ASK_FOR_PREFILL)
    return Leg(one, {"x-request-id": attempt.request_id})


def returned_params(raw: Params) -> Any:
    """The whole object, unread."""
    return raw if bytes(raw).startswith(b"{") else None


def hand_over(body: Body, attempt: HandoverAttempt, handoff: Any) -> Leg:
    return Leg({**body, "kv_transfer_params": handoff}, attempt.decode_headers)


PULL = ForwardProtocol(
    name="nixl",
    order="serial",
    routes=VLLM_ROUTES,
    prefill=ask_for_prefill,
    extract=returned_params,
    transfer_mode="pull",
    decode=hand_over,
)


def identity(raw: Params) -> Mapping[str, Any] | None:
    """The identity of the prefill engine's process."""
    params = object_of(raw)
    if params is None or any(params.get(key) is None for key in _IDENTITY):
        return None
    keys = (*_IDENTITY, "pp_size")
    return {key: params[key] for key in keys if params.get(key) is not None}


def _paired(body: Body, attempt: HandoverAttempt) -> Leg:
    """The prefill engine pairs the legs by their request id, so both have the same. vLLM's
    Responses API takes it from the body."""
    if attempt.route == RESPONSES:
        body = {**body, "request_id": f"resp_{attempt.unique}"}
    return Leg(body, {"x-request-id": attempt.request_id})


def _ask_to_push(body: Body, attempt: HandoverAttempt) -> Leg:
    return _paired(ask_for_prefill(body, attempt).body, attempt)


def _expect_push(body: Body, attempt: HandoverAttempt, handoff: Any) -> Leg:
    peer = handoff or attempt.prefill.identity
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        **(peer or {}),
        "remote_request_id": attempt.request_id,
    }
    return _paired({**body, "kv_transfer_params": params}, attempt)


PUSH = ForwardProtocol(
    name="nixl-push",
    order="parallel",
    routes=VLLM_ROUTES,
    prefill=_ask_to_push,
    extract=identity,
    transfer_mode="push",
    learn=identity,
    decode=_expect_push,
)
