"""vLLM's engine-core client; the workers of this Frontend take the place of the engine core.

It passes requests to the intake, and deltas and ends to vLLM's output processor in order.
What only an engine can do (sleep, profile, weights) stays vLLM's NotImplementedError,
which its app answers with 501.
"""

import asyncio
import time
from dataclasses import dataclass
from types import SimpleNamespace

from vllm.exceptions import VLLMError
from vllm.lora.request import LoRARequest
from vllm.tasks import SupportedTask
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.output_processor import OutputProcessor

from dynamo_lite.protocol.errors import DynamoLiteError
from dynamo_lite.protocol.generate import TokenDelta
from dynamo_lite.vllm.frontend.edge import current_context
from dynamo_lite.vllm.frontend.intake import Intake
from dynamo_lite.vllm.frontend.refusal import engine_failure, http_error
from dynamo_lite.vllm.frontend.request_context import RequestContext
from dynamo_lite.vllm.wire import output_or_error


@dataclass(frozen=True)
class SequenceEnd:
    """A request has ended with an error."""

    request_id: str
    error: DynamoLiteError


#: Deltas and errors from the intake's failover client, in order.
Deliveries = asyncio.Queue[list[TokenDelta] | SequenceEnd]


class RemoteCore(EngineCoreClient):
    """The engine core of one `RemoteEngineClient`.

    intake: takes the requests. deliveries: filled by its callbacks. causal: whether the model is.
    """

    def __init__(self, intake: Intake, deliveries: Deliveries, *, causal: bool):
        self.resources = SimpleNamespace(engine_dead=False)
        self.engine_ranks_managed = [0]
        self._intake, self._deliveries, self._causal = intake, deliveries, causal
        #: The HTTP requests of the sequences at workers.
        self._contexts: dict[str, RequestContext] = {}
        #: vLLM's states of the sequences. Set by the client.
        self.processor: OutputProcessor

    def check_admission(self, n: int) -> None:
        """Raises the 503 without a worker, the 429 if `n` more requests are too many."""
        try:
            self._intake.check(n)
        except DynamoLiteError as exc:
            raise http_error(exc) from exc

    async def get_supported_tasks_async(self) -> tuple[SupportedTask, ...]:
        return ("generate",)

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Returns when a worker has the request.

        Raises VLLMValidationError (400) for a request that cannot be sent or that every
        worker would refuse, GracefulHTTPError (429, 503, 504) for one that is not taken now.
        """
        if request.abort_immediately:
            return  # releases blocks of vLLM's own KV transfer, which is not used here
        if (context := current_context()) is not None:
            self._contexts[request.request_id] = context
        try:
            await self._intake.submit(request, context, causal=self._causal)
        except BaseException as exc:
            self._contexts.pop(request.request_id, None)
            # A local engine takes every request. A worker may refuse, or the caller may cancel
            # while the request is being placed: then its state must be removed.
            self.processor.abort_requests([request.request_id], internal=True)
            error = http_error(exc) if isinstance(exc, DynamoLiteError) else exc
            if context is not None and isinstance(error, VLLMError):
                context.error = error
            if error is exc:
                raise
            raise error from exc

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._contexts.pop(request_id, None)
        await self._intake.abort(request_ids)

    async def add_lora_async(self, lora_request: LoRARequest) -> bool:
        """Each worker loads an adapter at its first request with it."""
        return True

    async def get_output_async(self) -> EngineCoreOutputs:
        """One engine step of one worker."""
        while True:
            received = await self._deliveries.get()
            if isinstance(received, SequenceEnd):
                await self._end(received)
                continue
            now = time.monotonic()
            for delta in received:
                self._intake.delivered(delta)
                if delta.error is not None:
                    await self._fail(delta.request_id, engine_failure(delta.error))
                elif delta.finish_reason is not None:
                    self._contexts.pop(delta.request_id, None)
            outputs = [output_or_error(delta, now) for delta in received]
            failed = [o.request_id for o in outputs if o.finish_reason is FinishReason.ERROR]
            await self.abort_requests_async(failed)
            return EngineCoreOutputs(outputs=outputs, timestamp=now)

    async def _end(self, ended: SequenceEnd) -> None:
        self._intake.leave(ended.request_id, "error", str(ended.error))
        await self._fail(ended.request_id, http_error(ended.error))

    async def _fail(self, request_id: str, error: VLLMError) -> None:
        """Ends the request of one sequence with `error`, and aborts its other sequences."""
        if (context := self._contexts.pop(request_id, None)) is not None:
            context.error = error
        state = self.processor.request_states.get(request_id)
        if state is None or state.queue is None:
            return
        owner = request_id if state.parent_req is None else state.parent_req.request_id
        ended = self.processor.abort_requests([owner], internal=True)
        state.queue.put(error)
        await self.abort_requests_async([other for other in ended if other != request_id])

    def shutdown(self, timeout: float | None = None) -> None:
        """Nothing to do: failover client and transport belong to the component."""
