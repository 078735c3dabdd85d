"""Messages of the generate endpoint.

A frontend opens one TCP connection to each decode worker and introduces itself
(`Hello`). It then sends each request over NATS; the worker answers at once
(`Accepted` or `Refused`), and streams what the engine produces over the TCP
connection, one `Deltas` frame per engine step. Cancels travel on the same
connection in the other direction. Closing the connection cancels everything
that was asked through it.
"""

from typing import Annotated, Any

import msgspec

from dynamo_lite.protocol.codec import WIRE_VERSION, Decoder

RequestId = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
#: Numbers that are neither infinite nor none at all: clocks are compared with them.
Timestamp = Annotated[float, msgspec.Meta(ge=0, le=1e11)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate (`n > 1` is fanned out before).

    sampling: the engine's own sampling parameters, msgpack; opaque here.
    client_id: the `Hello` of the connection that takes the deltas.
    arrival_time: seconds since the epoch.
    reasoning_ended: whether a grammar applies from the first token (None: the
    engine looks for the end of the reasoning itself). reasoning_parser_kwargs:
    how it builds the parser that looks.
    output_token_ids: generated elsewhere already. The engine goes on after them
    and counts them against the request's own limits; where they leave nothing to
    generate, its only delta has the finish_reason and no token.
    timeout_s: what was left of the request's time when it was sent. Relative,
    because the clocks of two hosts differ.
    moved: a worker had accepted it and is lost. Limits that hold back new requests
    do not apply.
    session: requests with the same one like the same worker.
    """

    request_id: RequestId
    client_id: str
    prompt_token_ids: list[TokenId]
    sampling: bytes
    arrival_time: Timestamp
    priority: int = 0
    cache_salt: str | None = None
    trace_headers: dict[str, str] | None = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None
    output_token_ids: list[TokenId] = []
    timeout_s: Seconds | None = None
    moved: bool = False
    session: Annotated[str, msgspec.Meta(max_length=256)] | None = None
    wire_version: int = WIRE_VERSION


class Accepted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The worker has the request; deltas follow on the stream."""


class RequestRefused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The worker did not take the request. elsewhere: another worker may.

    busy: it is at a limit of its own; it may have room in `retry_after_s` seconds.
    """

    reason: str
    elsewhere: bool
    busy: bool = False
    retry_after_s: Seconds = 1.0


#: Largest output of one request in one engine step. What exceeds a message goes in parts,
#: but a connection queues no more than 64 MiB, and others use it, too.
MAX_DELTA_BYTES = 40 << 20


class LogprobRows(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities of `rows` positions, `width` candidates each.

    token_ids: int64[rows * width]; logprobs: float32[rows * width];
    ranks: int64[rows]; all little-endian, row-major.
    """

    rows: Count
    width: Count
    token_ids: bytes
    logprobs: bytes
    ranks: bytes

    @staticmethod
    def size_of(rows: int, width: int) -> int:
        """In bytes."""
        return rows * (12 * width + 8)

    def part(self, start: int, stop: int) -> "LogprobRows":
        """The rows from `start` to before `stop`."""
        first, last = start * self.width, stop * self.width
        return LogprobRows(
            rows=stop - start,
            width=self.width,
            token_ids=self.token_ids[8 * first : 8 * last],
            logprobs=self.logprobs[4 * first : 4 * last],
            ranks=self.ranks[8 * start : 8 * stop],
        )


class PrefillCounts(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where the prompt's KV came from, in tokens (first delta of a request).

    waited_s: in the engine's queue. prefill_s: from scheduled to this delta.
    """

    prompt_tokens: Count
    local_cached_tokens: Count
    external_cached_tokens: Count
    waited_s: Seconds = 0.0
    prefill_s: Seconds = 0.0


class TokenDelta(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """What one engine step added to one request.

    finish_reason: "stop" | "length" | "abort" | "error" | "repetition"; None
    while the request goes on; "abort" when its time is up. stop_reason: the stop
    token id or string. prompt_logprobs: may come in several deltas, of which all but the
    last have no token.
    """

    request_id: str
    token_ids: list[TokenId]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prefill: PrefillCounts | None = None
    logprobs: LogprobRows | None = None
    prompt_logprobs: LogprobRows | None = None


def halves(delta: TokenDelta) -> tuple[TokenDelta, TokenDelta] | None:
    """Two deltas that say the same one after the other; None for one that has nothing to
    share out. What is said once about the prompt is in the first, the end in the second."""
    first, second = _nothing_of(delta), msgspec.structs.replace(delta, prefill=None)
    prompt, tokens, rows = delta.prompt_logprobs, delta.token_ids, delta.logprobs
    if prompt is not None and prompt.rows > 1:
        middle = prompt.rows // 2
        return (
            msgspec.structs.replace(first, prompt_logprobs=prompt.part(0, middle)),
            msgspec.structs.replace(second, prompt_logprobs=prompt.part(middle, prompt.rows)),
        )
    if rows is not None and len(tokens) == rows.rows > 1:
        middle = rows.rows // 2
        return (
            msgspec.structs.replace(
                first,
                prompt_logprobs=prompt,
                token_ids=tokens[:middle],
                logprobs=rows.part(0, middle),
            ),
            msgspec.structs.replace(
                second,
                prompt_logprobs=None,
                token_ids=tokens[middle:],
                logprobs=rows.part(middle, rows.rows),
            ),
        )
    if prompt is not None and rows is not None:
        return (
            msgspec.structs.replace(first, prompt_logprobs=prompt),
            msgspec.structs.replace(second, prompt_logprobs=None),
        )
    return None


def _nothing_of(delta: TokenDelta) -> TokenDelta:
    return TokenDelta(request_id=delta.request_id, token_ids=[], prefill=delta.prefill)


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """First frame on a connection, from the frontend."""

    client_id: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    wire_version: int = WIRE_VERSION


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Frontend to worker: nobody waits for these requests any more."""

    request_ids: list[RequestId]


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Worker to frontend: the `Hello` was accepted."""


class Deltas(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Worker to frontend: one engine step's output for this frontend."""

    deltas: list[TokenDelta]


decode_generate_request: Decoder[GenerateRequest] = Decoder(GenerateRequest)
decode_generate_reply: Decoder[Accepted | RequestRefused] = Decoder(Accepted | RequestRefused)
decode_client_frame: Decoder[Hello | Cancel] = Decoder(Hello | Cancel)
decode_worker_frame: Decoder[Welcome | Deltas] = Decoder(Welcome | Deltas)
