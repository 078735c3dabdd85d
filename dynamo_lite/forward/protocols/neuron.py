"""AWS Neuron's disaggregated inference: both legs at once, the first token from the prefill leg.

The engines find each other by the request id. Source: aws-neuron/upstreaming-to-vllm,
`neuron_immediate_first_token_proxy_server.py`.
"""

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


def _static(body: Body, attempt: HandoverAttempt) -> Leg:
    return Leg(body, {"x-request-id": bare_id(attempt)})


def _dynamic(body: Body, attempt: HandoverAttempt, other: Peer) -> Leg:
    """Each engine's id ends with the other one's address."""
    request_id = f"{bare_id(attempt)}_{other.address}"
    return Leg(body, {"x-request-id": request_id}, (request_id, attempt.unique))


#: One prefill and one decode engine, which know each other by their own configuration.
STATIC = ForwardProtocol(
    name="neuron-static",
    order="parallel",
    routes=frozenset({CHAT, COMPLETIONS}),
    prefill=lambda body, attempt: _static(_prefill_body(body), attempt),
    decode=lambda body, attempt, _: _static(body, attempt),
    # It waits for the KV of every request.
    decodes_alone=False,
    batches=True,
    first_token_from_prefill=True,
)

#: Any number of each.
DYNAMIC = ForwardProtocol(
    name="neuron-dynamic",
    order="parallel",
    routes=STATIC.routes,
    prefill=lambda body, one: _dynamic(_prefill_body(body), one, one.decode),
    decode=lambda body, one, _: _dynamic(body, one, one.prefill),
    decodes_alone=False,
    batches=True,
    first_token_from_prefill=True,
)
