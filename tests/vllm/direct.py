"""Requests to decode workers past the HTTP server, as a Frontend sends them.

For graphs without a Frontend, and for what a Frontend does not pass on as it is.
"""

import asyncio
import itertools
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any, Self

from vllm import SamplingParams

from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import decode_json
from dynamo_lite.protocol.generate import GenerateRequest, TokenDelta
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.request_plane.client import RemoteGenerateClient
from dynamo_lite.runtime.etcd.store import EtcdStore
from dynamo_lite.vllm.wire import sampling_to_bytes
from tests.vllm.graph import NAMESPACE

_ANSWER_S = 60.0


class Direct:
    """Async context manager; asks one decode worker.

    lease: its lease, in hexadecimal; "" where it is the only one of its namespace.
    """

    def __init__(self, etcd_url: str, namespace: str = NAMESPACE, *, lease: str = ""):
        self._etcd_url = etcd_url
        self._prefix = names.endpoint_prefix(namespace, "VllmWorker", "generate") + lease
        self._numbers = itertools.count()
        self._tokens: dict[str, list[int]] = {}
        self._ends: dict[str, asyncio.Future[None]] = {}

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            store = await stack.enter_async_context(EtcdStore(self._etcd_url))
            [record] = (await store.get_prefix(self._prefix)).values()
            self._member = decode_json(record, EndpointRecord)
            client = RemoteGenerateClient("direct", self._take, self._lost)
            self._client = await stack.enter_async_context(client)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def tokens(
        self, prompt: list[int], *, max_tokens: int = 8, local: bool = False
    ) -> list[int]:
        """The greedy tokens. local: the worker computes the whole prompt itself, and shares no
        prefix with what is not."""
        request_id = f"direct-{next(self._numbers)}"
        sampling: dict[str, Any] = {
            "temperature": 0,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "detokenize": False,
        }
        if local:
            sampling["skip_reading_prefix_cache"] = True
        request = GenerateRequest(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling=sampling_to_bytes(SamplingParams(**sampling)),
            arrival_time=time.time(),
            cache_salt="local" if local else None,
        )
        self._tokens[request_id] = []
        ended = self._ends[request_id] = asyncio.get_running_loop().create_future()
        async with asyncio.timeout(_ANSWER_S):
            await self._client.submit(self._member, request)
            await ended
        return self._tokens[request_id]

    def _take(self, deltas: Sequence[TokenDelta]) -> None:
        for delta in deltas:
            self._tokens[delta.request_id] += delta.token_ids
            if delta.finish_reason is None:
                continue
            end = self._ends[delta.request_id]
            if end.done():
                continue
            if delta.finish_reason == "length":
                end.set_result(None)
            else:
                end.set_exception(AssertionError(f"it ended with {delta.finish_reason}"))

    def _lost(self, request_ids: Sequence[str], why: str) -> None:
        for request_id in request_ids:
            self._ends[request_id].set_exception(AssertionError(f"{request_id} is lost: {why}"))
