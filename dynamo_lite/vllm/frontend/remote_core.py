"""vLLM's engine-core client; the workers of this Frontend take the place of the engine core.

It passes requests to the intake, and deltas and ends to vLLM's output processor in order.
What only an engine can do (sleep, profile, LoRA, weights) stays vLLM's NotImplementedError,
which its app answers with 501.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

from vllm.tasks import SupportedTask
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.core_client import EngineCoreClient

from dynamo_lite.protocol.errors import DynamoLiteError
from dynamo_lite.protocol.generate import TokenDelta
from dynamo_lite.vllm.frontend.edge import current_context, engine_failure, http_error
from dynamo_lite.vllm.frontend.intake import Intake
from dynamo_lite.vllm.wire import output_or_error


@dataclass(frozen=True)
class _Ended:
    request_id: str
    error: DynamoLiteError


class Deliveries:
    """Deltas and errors from the failover client, in order, for one `RemoteCore`.

    `on_deltas` and `on_ended` are the failover client's callbacks.
    """

    def __init__(self) -> None:
        self._queue: asyncio.Queue[list[TokenDelta] | _Ended] = asyncio.Queue()

    def on_deltas(self, deltas: list[TokenDelta]) -> None:
        self._queue.put_nowait(deltas)

    def on_ended(self, request_id: str, error: DynamoLiteError) -> None:
        self._queue.put_nowait(_Ended(request_id, error))

    async def get(self) -> list[TokenDelta] | _Ended:
        return await self._queue.get()


#: Ends a sequence, by its id, with an error; returns the other sequences that end with it.
FailRequest = Callable[[str, Exception], list[str]]
#: Makes the core of an engine client; a `partial` of `RemoteCore`.
OpenCore = Callable[..., "RemoteCore"]


class RemoteCore(EngineCoreClient):
    """The engine core of one `RemoteEngineClient`.

    intake: takes the requests. deliveries: from the intake's failover client. fail: ends a
    sequence of the client. causal: whether the model is.
    """

    def __init__(
        self,
        intake: Intake,
        deliveries: Deliveries,
        *,
        fail: FailRequest,
        causal: bool,
    ):
        self.resources = SimpleNamespace(engine_dead=False)
        self.engine_ranks_managed = [0]
        self._intake, self._deliveries = intake, deliveries
        self._fail, self._causal = fail, causal

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
        try:
            await self._intake.submit(request, current_context(), causal=self._causal)
        except DynamoLiteError as exc:
            raise http_error(exc) from exc

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        await self._intake.abort(request_ids)

    async def get_output_async(self) -> EngineCoreOutputs:
        """One engine step of one worker."""
        while True:
            received = await self._deliveries.get()
            if isinstance(received, _Ended):
                await self._end(received)
                continue
            now = time.monotonic()
            for delta in received:
                self._intake.delivered(delta)
                if delta.error is not None:
                    orphans = self._fail(delta.request_id, engine_failure(delta.error))
                    await self.abort_requests_async(orphans)
            outputs = [output_or_error(delta, now) for delta in received]
            failed = [o.request_id for o in outputs if o.finish_reason is FinishReason.ERROR]
            await self.abort_requests_async(failed)
            return EngineCoreOutputs(outputs=outputs, timestamp=now)

    async def _end(self, ended: _Ended) -> None:
        """Also aborts the other sequences of the same request."""
        self._intake.leave(ended.request_id, "error", str(ended.error))
        orphans = self._fail(ended.request_id, http_error(ended.error))
        await self.abort_requests_async(orphans)

    def shutdown(self, timeout: float | None = None) -> None:
        """Nothing to do: failover client and transport belong to the component."""
