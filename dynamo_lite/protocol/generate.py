"""Messages of the generate endpoint.

A frontend opens one TCP connection to each decode worker and introduces itself (`Hello`). It sends
its requests on that connection (`Submit`). The worker answers each one (`SubmitReply`) and streams
the engine's output, one `Deltas` frame per engine step. `Cancel` ends requests early. Closing the
connection cancels all its requests.
"""

from typing import Annotated, Any

import msgspec

from dynamo_lite.protocol.codec import MAX_MESSAGE_BYTES, WIRE_VERSION, Decoder

RequestId = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
#: Finite numbers: they are compared with clocks.
Timestamp = Annotated[float, msgspec.Meta(ge=0, le=1e11)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


#: Of what a prompt has beside its tokens: images and other media, or embeddings.
MAX_INPUT_BYTES = 40 << 20
#: Largest frame from a Frontend to a worker. A connection queues less than 64 MiB.
MAX_SUBMIT_BYTES = MAX_INPUT_BYTES + MAX_MESSAGE_BYTES

#: How long a worker may load an adapter before it answers the first request with it.
ADAPTER_LOAD_S = 60.0


class Adapter(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A LoRA adapter (https://arxiv.org/abs/2106.09685).

    Also the record of one that a client has loaded, at `names.adapter_key`.
    """

    #: The name of the model that clients ask for.
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    #: Its folder on the hosts of the workers, or its name on the hub.
    path: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
    #: Of its files; "" where no worker has read them yet.
    digest: Annotated[str, msgspec.Meta(max_length=64)] = ""

    @property
    def key(self) -> str:
        """Its name in engines, which compare adapters by name: one for each name and path."""
        return f"{len(self.name)}:{self.name}@{self.path}"


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate (`n > 1` is fanned out before)."""

    request_id: RequestId
    #: Of a prompt of embeddings: zeros, one for each.
    prompt_token_ids: list[TokenId]
    #: The engine's own sampling parameters, msgpack; opaque here.
    sampling: bytes
    #: Seconds since the epoch.
    arrival_time: Timestamp
    priority: int = 0
    cache_salt: str | None = None
    adapter: Adapter | None = None
    #: The prompt's images and other media, or embeddings, as the engine takes them; opaque here.
    inputs: Annotated[bytes, msgspec.Meta(max_length=MAX_INPUT_BYTES)] | None = None
    trace_headers: dict[str, str] | None = None
    #: Whether a grammar applies from the first token. None: the engine detects the end of the
    #: reasoning itself.
    reasoning_ended: bool | None = None
    #: Arguments of the parser that detects it.
    reasoning_parser_kwargs: dict[str, Any] | None = None
    #: Tokens that another worker generated already. The engine continues after them and counts them
    #: against the request's own limits.
    output_token_ids: list[TokenId] = []
    #: Seconds that were left of the request's time limit when it was sent. Relative, because the
    #: clocks of two hosts differ. The Frontend ends the request; here it limits a remote prefill.
    timeout_s: Seconds | None = None
    #: The request is migrated: a worker had accepted it, and is lost or drains. Limits on new
    #: requests do not apply.
    moved: bool = False
    #: Requests with the same session prefer the same worker.
    session: Annotated[str, msgspec.Meta(max_length=256)] | None = None


class Accepted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The worker has the request; deltas follow on the connection."""


class RequestRefused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The worker did not take the request."""

    reason: str
    #: Whether another worker may take it.
    elsewhere: bool
    #: Whether the worker is at a limit of its own, and may have room later.
    busy: bool = False


#: Largest output of one request in one engine step, which is one frame. A connection queues less
#: than 64 MiB, for all its requests.
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
    """Where the prompt's KV came from, in tokens (first delta of a request)."""

    prompt_tokens: Count
    local_cached_tokens: Count
    #: From a prefill worker, which may have computed them.
    external_cached_tokens: Count
    #: Seconds in the engine's queue.
    waited_s: Seconds = 0.0
    #: Seconds from scheduling to this delta.
    prefill_s: Seconds = 0.0
    #: What usage shows: those that were in the decode engine's prefix cache before, and those that
    #: are in it because of this request.
    cached_tokens: Count = 0
    created_cache_tokens: Count = 0


class EngineError(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Why an engine has ended a request with the finish reason "error"."""

    message: Annotated[str, msgspec.Meta(max_length=4096)]
    #: Whether the request is at fault.
    invalid: bool = False
    #: Whether it may succeed later.
    retryable: bool = False


class TokenDelta(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """What one engine step added to one request."""

    request_id: str
    token_ids: list[TokenId]
    #: "stop" | "length" | "error" | "repetition"; None while the request runs.
    finish_reason: str | None = None
    #: The stop token id or string.
    stop_reason: int | str | None = None
    prefill: PrefillCounts | None = None
    logprobs: LogprobRows | None = None
    prompt_logprobs: LogprobRows | None = None
    #: Of an engine that says why; only with the finish reason "error".
    error: EngineError | None = None


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """First frame on a connection, from the frontend."""

    client_id: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    wire_version: int = WIRE_VERSION


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Frontend to worker: these requests are not wanted there any more."""

    request_ids: list[RequestId]


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Worker to frontend: the `Hello` was accepted."""


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Frontend to worker: a request."""

    request_id: RequestId
    #: The encoded `GenerateRequest`. A malformed one is refused by itself; a malformed frame ends
    #: its connection.
    request: bytes


class SubmitReply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Worker to frontend: the reply to a `Submit`."""

    request_id: RequestId
    reply: Accepted | RequestRefused


class Deltas(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Worker to frontend: one engine step's output for this frontend."""

    deltas: list[TokenDelta]


decode_generate_request: Decoder[GenerateRequest] = Decoder(GenerateRequest, MAX_SUBMIT_BYTES)
decode_client_frame: Decoder[Hello | Submit | Cancel] = Decoder(
    Hello | Submit | Cancel, MAX_SUBMIT_BYTES
)
decode_worker_frame: Decoder[Welcome | SubmitReply | Deltas] = Decoder(
    Welcome | SubmitReply | Deltas, MAX_DELTA_BYTES
)
