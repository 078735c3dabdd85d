"""AWS Neuron's disaggregated inference: both legs at once, the first token from the prefill leg.

The engines find each other by the request id. Source: aws-neuron/upstreaming-to-vllm,
`neuron_immediate_first_token_proxy_server.py`.
"""

from dataclasses import replace

from dynamo_lite.forward.protocols.base import (
    CHAT,
    COMPLETIONS,
    Body,
    ForwardProtocol,
    HandoverAttempt,
    Leg,
    Peer,
)


def bare_id(attempt: HandoverAttempt) -> str:
    """The id that the client sees in place of both engines' ids, which may contain addresses."""
    return f"cmpl-{attempt.unique}"


def _prefill_body(body: Body) -> Body:
    """`stream` stays as the client has it: the first token is shown to the client."""
    one = {**body, "max_tokens": 1}
    for name in ("min_tokens", "max_completion_tokens"):
        if name in one:
            one[name] = 1
    return one


def _static_prefill(body: Body, attempt: HandoverAttempt) -> Leg:
    return Leg(_prefill_body(body), {"x-request-id": bare_id(attempt)})


def _static_decode(body: Body, attempt: HandoverAttempt, handoff: object) -> Leg:
    return Leg(dict(body), {"x-request-id": bare_id(attempt)})


def _dynamic_prefill(body: Body, attempt: HandoverAttempt) -> Leg:
    return Leg(_prefill_body(body), _names(attempt, attempt.decode), attempt.unique)


def _dynamic_decode(body: Body, attempt: HandoverAttempt, handoff: object) -> Leg:
    return Leg(dict(body), _names(attempt, attempt.prefill), attempt.unique)


def _names(attempt: HandoverAttempt, other: Peer) -> dict[str, str]:
    """Each engine's id ends with the other one's address."""
    return {"x-request-id": f"{bare_id(attempt)}_{other.address}"}


#: One prefill and one decode engine, which know each other by their own configuration.
STATIC = ForwardProtocol(
    name="neuron-static",
    order="parallel",
    routes=frozenset({CHAT, COMPLETIONS}),
    prefill=_static_prefill,
    decode=_static_decode,
    # It waits for the KV of every request.
    decodes_alone=False,
    batches=True,
    first_token_from_prefill=True,
)

#: Any number of each.
DYNAMIC = replace(
    STATIC,
    name="neuron-dynamic",
    prefill=_dynamic_prefill,
    decode=_dynamic_decode,
)
