"""A job that its engine computes while its claim is on the way.

A permit keeps the engine from writing, and from reading the decode engine's prefix, until the
claim is granted. Until then the first token of the answer is held back, too. If the claim is not
granted, the computation is stopped at once.
"""

import asyncio
from collections.abc import Callable
from typing import Self

from dynamo_lite.disagg.engine import AttemptOutcome, OnFirstToken, PrefillEngine
from dynamo_lite.protocol.errors import DynamoLiteError, ProtocolError
from dynamo_lite.protocol.prefill import RemotePrefillRequest
from dynamo_lite.protocol.records import EngineMetadata
from dynamo_lite.runtime.permits import Permits
from dynamo_lite.runtime.tasks import end_tasks


class Computation:
    """An async context manager; in the context the engine works on the job.

    After the context nothing of the job is in the engine, so it may be delivered here again. A
    job that was not written with `write` was not written at all, and never will be.
    cancelled: whether the attempt is not wanted any more. permits: the engine's ranks read them.
    on_first_token: awaited with the first token of the answer, after the grant.
    A class and not a generator, for the reason that `runtime.tasks.running` gives.
    """

    def __init__(
        self,
        engine: PrefillEngine,
        permits: Permits,
        request: RemotePrefillRequest,
        target: EngineMetadata,
        *,
        cancelled: Callable[[], bool],
        on_first_token: OnFirstToken,
    ):
        self._engine, self._permit = engine, permits.open()
        self._on_first_token = on_first_token
        self._request, self._target, self._cancelled = request, target, cancelled
        self._task: asyncio.Task[AttemptOutcome] | None = None
        self._leaves = False
        #: Whether the engine may write.
        self._granted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        #: Whether the engine has accepted the job and ended it.
        self.ran = False

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run(), name=f"prefill {self._request.attempt}")
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert self._task is not None
        try:
            self._decide(0)
            self._leaves = True
            if not self._task.done() and (kind is None or issubclass(kind, DynamoLiteError)):
                await self._engine.abandon(self._request.attempt)
                await self._task
        finally:
            self._permit.close()
            await end_tasks(self._task)

    async def write(self, grant: int) -> AttemptOutcome:
        """The claim is granted: lets the engine write, unless the attempt was cancelled. Returns
        when no write is in flight. grant: id of the grant."""
        assert self._task is not None
        self._decide(0 if self._cancelled() else grant)
        return await self._task

    def stop_writing(self) -> None:
        """The engine starts no write from now on, not even one of blocks that are computed."""
        self._permit.refuse()

    def _decide(self, grant: int) -> None:
        """grant: 0 to refuse the permit."""
        if grant:
            self._permit.grant(grant)
        else:
            self._permit.refuse()
        if not self._granted.done():
            self._granted.set_result(bool(grant))

    async def _send_first_token(self, token_id: int, cached: int) -> None:
        if await self._granted:
            await self._on_first_token(token_id, cached)

    async def _run(self) -> AttemptOutcome:
        attempt = self._request.attempt
        # The engine does not know the attempt yet, so `abandon` had no effect.
        if self._leaves or self._cancelled():
            return AttemptOutcome(attempt, "abandoned", "cancelled before its prefill began")
        try:
            _check_blocks(self._request, self._target)
            ended = await self._engine.prefill(
                self._request, self._target, self._permit.permit, self._send_first_token
            )
        except DynamoLiteError as exc:
            return AttemptOutcome(attempt, "failed", str(exc))
        self.ran = True
        return ended


def _check_blocks(request: RemotePrefillRequest, target: EngineMetadata) -> None:
    """Raises ProtocolError unless a job's blocks cover its tokens and are in the pool."""
    size = target.block_size_tokens
    first, rest = divmod(request.num_computed_tokens, size)
    wanted = -(-len(request.prompt_token_ids) // size) - first
    if rest or wanted <= 0 or len(request.block_ids) != wanted:
        raise ProtocolError(
            f"{len(request.block_ids)} blocks of {size} tokens for tokens"
            f" {request.num_computed_tokens} to {len(request.prompt_token_ids)}"
        )
    if len(request.prefix_block_ids) not in (0, first):
        raise ProtocolError(
            f"{len(request.prefix_block_ids)} blocks of {size} tokens for the first"
            f" {request.num_computed_tokens} tokens"
        )
    highest = max(request.block_ids + request.prefix_block_ids)
    if highest >= target.num_blocks:
        raise ProtocolError(f"block {highest} is not one of the engine's {target.num_blocks}")
