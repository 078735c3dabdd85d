"""A client of a worker's generate endpoint, in the Frontend's place."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from benchmarks.null_worker import TOKEN_ID
from dynamo_lite.protocol import names
from dynamo_lite.protocol.generate import GenerateRequest, TokenDelta
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.request_plane.client import RemoteGenerateClient
from dynamo_lite.runtime.certificates import Certificates, with_files
from dynamo_lite.runtime.etcd.store import EtcdStore
from dynamo_lite.runtime.members.roster import Roster
from dynamo_lite.serve.certificate_folder import make_certificates
from dynamo_lite.serve.run_state import RunState

_FIND_S = 10.0
_ANSWER_S = 60.0
_PROMPT_TOKENS = 40


class DirectClient:
    """Use `direct_client`."""

    def __init__(self, member: EndpointRecord, certificates: Certificates | None):
        self._member = member
        self._running: dict[str, asyncio.Future[None]] = {}
        self._numbers = itertools.count()
        self.transport = RemoteGenerateClient(
            "bench",
            self._on_deltas,
            self._on_lost,
            certificates=certificates,
            component=member.component,
        )

    async def generate(self, tokens: int) -> None:
        """One request, to its last delta. Raises RuntimeError when the worker is lost, TimeoutError
        after a minute."""
        request = GenerateRequest(
            request_id=f"bench-{next(self._numbers)}",
            prompt_token_ids=[TOKEN_ID] * _PROMPT_TOKENS,
            sampling=msgspec.msgpack.encode({"max_tokens": tokens, "temperature": 1.0}),
            arrival_time=time.time(),
        )
        ended = self._running[request.request_id] = asyncio.get_running_loop().create_future()
        async with asyncio.timeout(_ANSWER_S):
            await self.transport.submit(self._member, request)
            await ended

    def _on_deltas(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            if delta.finish_reason is not None:
                self._running.pop(delta.request_id).set_result(None)

    def _on_lost(self, request_ids: Sequence[str], why: str) -> None:
        for request_id in request_ids:
            self._running.pop(request_id).set_exception(RuntimeError(why))


def as_frontend(run: RunState) -> Certificates | None:
    """Of a graph that has made its certificates itself; None if it has none."""
    if not run.certificates:
        return None
    folder = Path(run.certificates)
    make_certificates(folder, run.namespace, ["Frontend"])
    return Certificates(folder, run.namespace, "Frontend")


@asynccontextmanager
async def direct_client(run: RunState, service: str) -> AsyncIterator[DirectClient]:
    """A client of the one live worker of `service`."""
    async with (
        EtcdStore(with_files(run.etcd, run.folder, "Frontend")) as store,
        Roster(store, names.endpoint_prefix(run.namespace, service, "generate")) as roster,
    ):
        changed = asyncio.Event()
        with roster.on_change(lambda joined, left: changed.set()):
            async with asyncio.timeout(_FIND_S):
                while len(roster.members) != 1:
                    await changed.wait()
                    changed.clear()
        (member,) = roster.members
        client = DirectClient(member, as_frontend(run))
        async with client.transport:
            yield client
