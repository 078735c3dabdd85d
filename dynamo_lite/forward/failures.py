"""How an attempt ends when it is not answered, and what the client gets.

Final         an engine's answer that ends the request, such as its 4xx
EngineFailed  an engine failed before anything was sent to the client
├── PrefillFailed
└── DecodeFailed
Broken        an answer broke off after its first byte: nothing is repeated
"""

from typing import Literal

from dynamo_lite.forward import engine_answer
from dynamo_lite.forward.client import Answer, error
from dynamo_lite.forward.engines import KnownEngine

#: `refused`: no connection; `broken`: the connection was lost; `too_large`: the answer is larger
#: than what is kept in memory; `status`: it answered with an error of its own; `event`: the same in
#: place of a stream's first output; `unpaired`: nothing was handed over, or by another process than
#: expected; `mismatch`: the engine speaks another protocol; `malformed`: its answer cannot be read.
FailureKind = Literal[
    "refused",
    "timeout",
    "broken",
    "too_large",
    "status",
    "event",
    "unpaired",
    "mismatch",
    "malformed",
]
KINDS: tuple[FailureKind, ...] = (
    *("refused", "timeout", "broken", "too_large"),
    *("status", "event", "unpaired", "mismatch", "malformed"),
)
RETRY_AFTER = {"retry-after": "1"}


class Final(Exception):
    """The request ends with this answer."""

    def __init__(self, answer: Answer):
        super().__init__(answer.status)
        self.answer = answer


class EngineFailed(Exception):
    """answer: the engine's own, if it gave one."""

    def __init__(
        self, engine: KnownEngine, kind: FailureKind, detail: str = "", answer: Answer | None = None
    ):
        super().__init__(f"engine {engine.name}: {kind}{': ' if detail else ''}{detail}")
        self.engine, self.answer = engine, answer
        self.kind: FailureKind = kind


class PrefillFailed(EngineFailed):
    """A prefill leg failed."""


class DecodeFailed(EngineFailed):
    """A decode leg failed."""


class Broken(Exception):
    """A decode leg broke off, or a prefill leg that sends tokens to the client."""


def failure_answer(failure: EngineFailed) -> Answer:
    """The answer for the client when no engine is left to try. It contains no addresses."""
    if failure.answer is not None:
        return failure.answer
    leg = "prefill" if isinstance(failure, PrefillFailed) else "decode"
    match failure.kind:
        case "timeout":
            return error(504, "GatewayTimeout", f"the {leg} engine did not answer in time")
        case "refused":
            text = f"the {leg} engine cannot be reached; try again later"
            return error(503, "ServiceUnavailableError", text, RETRY_AFTER)
        case "too_large":
            limit = f"{engine_answer.MAX_WHOLE_BYTES >> 20} MiB"
            text = f"the {leg} engine's answer is larger than {limit}, the most that is read"
            return error(502, "BadGateway", text)
        case kind:
            return error(502, "BadGateway", f"the {leg} engine failed ({kind})")
