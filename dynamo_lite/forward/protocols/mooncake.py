"""vLLM's MooncakeConnector, and the dialect of Llumnix' patched one.

Source: vLLM 0.32, `mooncake/`; Llumnix, `pd_vllm_mooncake_forwarder.go`.
"""

import msgspec

from dynamo_lite.forward.protocols.base import (
    MIN_TOKENS_ROUTES,
    VLLM_ROUTES,
    Body,
    ForwardProtocol,
    HandoverAttempt,
    Leg,
)
from dynamo_lite.forward.protocols.nixl import ask_for_prefill, hand_over, returned_params
from dynamo_lite.forward.protocols.one_token import one_token


class _Rank(msgspec.Struct):
    engine_id: str


def engine_ids(answer: bytes) -> dict[int, str]:
    """The answer of `GET /query`: rank to engine id. Raises ValueError."""
    try:
        ranks = msgspec.json.decode(answer, type=dict[str, _Rank])
        return {int(rank): found.engine_id for rank, found in ranks.items()}
    except msgspec.DecodeError as exc:
        raise ValueError(f"unexpected answer of /query: {exc}") from exc


def rank_of(attempt: HandoverAttempt) -> int:
    """The data-parallel rank of the prefill engine that computes: drawn by the attempt's id."""
    ranks = sorted(attempt.prefill.engine_ids)
    return ranks[int(attempt.unique[:8], 16) % len(ranks)]


def _prefill(body: Body, attempt: HandoverAttempt) -> Leg:
    one = one_token(body, attempt.route)
    one["kv_transfer_params"] = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "transfer_id": f"xfer-{attempt.unique}",
    }
    headers = {
        "x-request-id": attempt.request_id,
        "x-data-parallel-rank": str(rank_of(attempt)),
    }
    return Leg(one, headers)


def _decode(body: Body, attempt: HandoverAttempt, handoff: object) -> Leg:
    peer = attempt.prefill
    host = f"[{peer.host}]" if ":" in peer.host else peer.host
    params = {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "transfer_id": f"xfer-{attempt.unique}",
        "remote_bootstrap_addr": f"http://{host}:{peer.port}",
        "remote_engine_id": peer.engine_ids[rank_of(attempt)],
    }
    return Leg({**body, "kv_transfer_params": params}, attempt.decode_headers)


MOONCAKE = ForwardProtocol(
    name="mooncake",
    order="parallel",
    routes=MIN_TOKENS_ROUTES,
    default_port=8998,
    query_path="/query",
    prefill=_prefill,
    decode=_decode,
)

LLUMNIX = ForwardProtocol(
    name="llumnix-mooncake",
    order="serial",
    routes=VLLM_ROUTES,
    prefill=ask_for_prefill,
    extract=returned_params,
    decode=hand_over,
)
