"""How an attempt ends when it is not answered, and what the client gets.

Final      an engine's answer that ends the request, such as its 4xx
LegFailed  an engine failed before anything was sent to the client
Broken     an answer broke off after its first byte: nothing is repeated
"""

from typing import Literal

from dynamo_lite.forward.client import Answer, error
from dynamo_lite.forward.engines import KnownEngine
from dynamo_lite.protocol.errors import DynamoLiteError

#: `refused`: no connection; `broken`: the connection was lost; `too_large`: the answer is larger
#: than what is kept in memory; `status`: it answered with an error of its own, at once or in place
#: of a stream's first output; `unpaired`: nothing was handed over, or by another process or
#: protocol than expected; `malformed`: its answer cannot be read; `too_long`: the prompt is longer
#: than this prefill engine takes.
FailureKind = Literal[
    "refused", "timeout", "broken", "too_large", "status", "unpaired", "malformed", "too_long"
]
#: A check is a question of our own, and no part of a client's request.
LegKind = Literal["prefill", "decode", "check"]
RETRY_AFTER = {"retry-after": "1"}
#: Most bytes of a whole answer, or of one event that may have to be changed, that are kept in
#: memory. An answer that passes as bytes has no limit.
MAX_WHOLE_BYTES = 256 << 20
#: One of these is in vLLM's and SGLang's errors about a prompt that is too long.
_TOO_LONG = (b"context length", b"maximum model length", b"max_model_len")


class Final(Exception):
    """The request ends with this answer."""

    def __init__(self, answer: Answer):
        super().__init__(answer.status)
        self.answer = answer


class LegFailed(DynamoLiteError):
    """answer: the engine's own, if it gave one."""

    def __init__(
        self,
        engine: KnownEngine,
        leg: LegKind,
        kind: FailureKind,
        detail: str = "",
        answer: Answer | None = None,
    ):
        super().__init__(f"engine {engine.name}: {kind}{': ' if detail else ''}{detail}")
        self.engine, self.answer = engine, answer
        self.leg: LegKind = leg
        self.kind: FailureKind = kind


def refused(engine: KnownEngine, leg: LegKind, answer: Answer) -> LegFailed | Final:
    """What an engine's 4xx means: the request is wrong, or only too long for its prefill engine."""
    if leg == "prefill" and answer.status == 400 and any(mark in answer.body for mark in _TOO_LONG):
        return LegFailed(engine, leg, "too_long", answer=answer)
    return Final(answer)


def check_size(size: int, engine: KnownEngine, leg: LegKind) -> None:
    """Raises LegFailed for more bytes than are kept in memory."""
    if size > MAX_WHOLE_BYTES:
        text = f"larger than {MAX_WHOLE_BYTES >> 20} MiB"
        raise LegFailed(engine, leg, "too_large", text)


class Broken(Exception):
    """A decode leg broke off, or a prefill leg that sends tokens to the client."""


def failure_answer(failure: LegFailed) -> Answer:
    """The answer for the client when no engine is left to try. It contains no addresses."""
    if failure.answer is not None:
        return failure.answer
    leg = failure.leg
    match failure.kind:
        case "timeout":
            return error(504, "GatewayTimeout", f"the {leg} engine did not answer in time")
        case "refused":
            text = f"the {leg} engine cannot be reached; try again later"
            return error(503, "ServiceUnavailableError", text, RETRY_AFTER)
        case "too_large":
            limit = f"{MAX_WHOLE_BYTES >> 20} MiB"
            text = f"the {leg} engine's answer is larger than {limit}, the most that is read"
            return error(502, "BadGateway", text)
        case kind:
            return error(502, "BadGateway", f"the {leg} engine failed ({kind})")
