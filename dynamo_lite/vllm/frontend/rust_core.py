"""The engine-core protocol towards vLLM's Rust frontend; the workers take the engine's place.

Frames with requests become `GenerateRequest`s, frames with aborts become cancels. The deltas
that arrive in one frame of a worker leave in one frame. A delta that has only tokens is sent
as it is: as msgpack, it is equal to vLLM's `EngineCoreOutput`.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

import msgspec
from vllm import SamplingParams
from vllm.exceptions import VLLMError, VLLMValidationError
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    FinishReason,
    UtilityOutput,
)
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, bytestr

from dynamo_lite.protocol.errors import DynamoLiteError
from dynamo_lite.protocol.generate import TokenDelta
from dynamo_lite.runtime.tasks import OwnedTasks
from dynamo_lite.vllm.frontend.intake import Intake
from dynamo_lite.vllm.frontend.request_context import MAX_SESSION, RequestContext
from dynamo_lite.vllm.wire import error_output, output_or_error

logger = logging.getLogger(__name__)

#: Sends one message to the Rust frontend.
SendFrames = Callable[[Sequence[bytestr]], None]

#: Checks a request's grammar and sets its backend, see `GrammarCheck`.
CheckGrammar = Callable[[SamplingParams], Awaitable[None]]

_ADD, _ABORT = EngineCoreRequestType.ADD.value, EngineCoreRequestType.ABORT.value
_UTILITY = EngineCoreRequestType.UTILITY.value

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode
_decode_ids = msgspec.msgpack.Decoder(list[str]).decode


class RustCore:
    """The engine of one Rust frontend. An async context manager: leaving it ends its tasks.

    send: never blocks. causal: whether the model is. timeout_s: time limit of a request, from its
    frame to its last token. `on_deltas` and `on_ended` are the callbacks of the intake's failover
    client.
    """

    def __init__(
        self,
        intake: Intake,
        send: SendFrames,
        check_grammar: CheckGrammar,
        *,
        causal: bool,
        timeout_s: float,
    ):
        self._intake, self._send, self._check_grammar = intake, send, check_grammar
        self._causal, self._timeout_s = causal, timeout_s
        #: The tasks of requests whose grammar is being checked.
        self._checking: dict[str, asyncio.Task[None]] = {}
        self._requests = MsgpackDecoder(EngineCoreRequest)
        self._arrays = MsgpackEncoder()
        self._tasks = OwnedTasks()

    async def __aenter__(self) -> "RustCore":
        return self

    async def __aexit__(self, *_: object) -> None:
        self._send = lambda frames: None  # the Rust frontend has ended
        await self._tasks.end()

    @property
    def in_flight(self) -> int:
        """Requests that have not ended."""
        return self._intake.in_flight + len(self._checking)

    # From the Rust frontend

    def take(self, frames: Sequence[bytes]) -> None:
        """One message: its type, msgpack, and arrays that the msgpack refers to."""
        kind, body = frames[0], frames[1:]
        if kind == _ADD:
            self._add(body)
        elif kind == _ABORT:
            self._tasks.start(self._abort(_decode_ids(body[0])), name="abort")
        elif kind == _UTILITY:
            self._refuse_utility(body[0])
        else:
            logger.error("the Rust frontend sent a message of an unknown type %r", kind)

    def _add(self, body: Sequence[bytes]) -> None:
        try:
            request = self._requests.decode(body)
        except (msgspec.DecodeError, VLLMError, TypeError, ValueError) as exc:
            request_id = _decode(body[0])[0]
            logger.warning("request %s was refused: it cannot be decoded: %s", request_id, exc)
            self._fail(request_id)
            return
        self._tasks.start(self._submit(request), name=f"request {request.request_id}")

    async def _submit(self, request: EngineCoreRequest) -> None:
        request_id = request.request_id
        if request.abort_immediately:
            return
        if request.sampling_params is not None:
            # The Rust frontend asks for a watermark in each request, whether or not the client
            # does. vLLM's Python frontend resolves this to False where none is configured.
            request.sampling_params.watermarking = False
        context = RequestContext(
            self._timeout_s,
            deadline=asyncio.get_running_loop().time() + self._timeout_s,
            session=(request.session_id or "")[:MAX_SESSION] or None,
        )
        try:
            if request.mm_features or request.prompt_embeds is not None:
                raise VLLMValidationError("Images are served by the Python edge only")
            await self._checked(request, context)
            await self._intake.submit(request, context, causal=self._causal)
        except (DynamoLiteError, VLLMError) as exc:
            logger.info("request %s was refused: %s", request_id, exc)
            self._fail(request_id)
        except Exception:
            logger.exception("request %s failed", request_id)
            self._fail(request_id)

    async def _checked(self, request: EngineCoreRequest, context: RequestContext) -> None:
        """Returns when the request's grammar has been checked. Requests whose grammar waits for
        its check count as admitted.

        Raises VLLMValidationError, DeadlineExceeded, NoWorkers and Overloaded.
        """
        params = request.sampling_params
        if params is None or params.structured_outputs is None:
            return
        task = asyncio.current_task()
        assert task is not None
        self._intake.check(len(self._checking) + 1)
        self._checking[request.request_id] = task
        try:
            async with asyncio.timeout_at(context.deadline):
                await self._check_grammar(params)
        except TimeoutError as exc:
            raise self._intake.late(context) from exc
        finally:
            self._checking.pop(request.request_id, None)

    async def _abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            if (task := self._checking.get(request_id)) is not None:
                task.cancel()
        await self._intake.abort(request_ids)

    def _refuse_utility(self, body: bytes) -> None:
        _, call_id, method, *_ = _decode(body)
        failure = f"{method} is not served here: there is no single engine behind this server"
        output = UtilityOutput(call_id=call_id, failure_message=failure)
        self._send([_encode(EngineCoreOutputs(utility_output=output))])

    # To the Rust frontend

    def on_deltas(self, deltas: list[TokenDelta]) -> None:
        now = time.monotonic()
        arrays = False
        outputs: list[TokenDelta | EngineCoreOutput] = []
        for delta in deltas:
            self._intake.delivered(delta)
            if _has_only_tokens(delta):
                outputs.append(delta)
            else:
                output, request_id = output_or_error(delta, now), delta.request_id
                if output.finish_reason is FinishReason.ERROR:
                    self._tasks.start(self._abort([request_id]), name=f"abort {request_id}")
                arrays = arrays or output.new_logprobs is not None
                arrays = arrays or output.new_prompt_logprobs_tensors is not None
                outputs.append(output)
        # Both classes have the same msgpack.
        step = EngineCoreOutputs(outputs=outputs, timestamp=now)  # type: ignore[arg-type]
        self._send(self._arrays.encode(step) if arrays else [_encode(step)])

    def on_ended(self, request_id: str, error: DynamoLiteError) -> None:
        """The reason is in the log: the Rust frontend answers with a text of its own."""
        self._intake.leave(request_id, "error", str(error))
        logger.info("request %s ended: %s", request_id, error)
        self._fail(request_id)

    def _fail(self, request_id: str) -> None:
        self._send([_encode(EngineCoreOutputs(outputs=[error_output(request_id)]))])


def _has_only_tokens(delta: TokenDelta) -> bool:
    return (
        delta.finish_reason is None
        and delta.prefill is None
        and delta.logprobs is None
        and delta.prompt_logprobs is None
    )
