"""Real engines on hosts: KV goes over the network that is cut."""

import asyncio
import time
from contextlib import AsyncExitStack
from typing import Self

from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.decisions import Explain, decode_explained
from dynamo_lite.protocol.errors import DynamoLiteError
from dynamo_lite.protocol.health import EngineStatus
from dynamo_lite.runtime.etcd.store import EtcdStore
from dynamo_lite.runtime.nats.messaging import NatsMessaging
from tests.builders import eventually
from tests.chaos.meters import Meters
from tests.chaos.questions import Question
from tests.hosts.load import question
from tests.hosts.rig import NAMESPACE, Rig
from tests.vllm.graph import decode_engines

#: How long until all is in order again, on a machine that is busy with other things.
_AGAIN_S = 240.0
_LOOK_S = 0.5
_TOKENS = 24
#: Decisions that are read of each engine.
_LAST = 50
#: What is counted when KV is not what its writer sent, or came without the attempt's claim:
#: another process has written.
_WRONG = ("commit_mismatches", 'dropped_messages{where="unclaimed"}')
#: The safeties at work.
_REFUSED = ("stopped_writes", "late_notices")


class Kv:
    """Async context manager, of a rig that is whole: its blocks and its workers' counters."""

    def __init__(self, rig: Rig):
        self._rig = rig
        self._free: int | None = None
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._meters = await self._stack.enter_async_context(Meters(self._rig.processes))
        self._counted = self._meters.totals()
        await self.at_rest()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def trouble(self) -> list[str]:
        """What went wrong since the last call."""
        now = self._meters.totals()
        counts = {name: int(now[name] - self._counted[name]) for name in _WRONG}
        self._counted = now
        return [f"{name}: {count}" for name, count in counts.items() if count]

    async def at_rest(self) -> str:
        """Waits until nothing is under way, and all decode engines have as many free blocks as at
        first. Returns how often the safeties have refused anything so far. Raises TimeoutError."""

        async def still() -> bool:
            try:
                found = await self._engines()
            except DynamoLiteError:
                return False
            free = {engine.free_blocks for engine in found.values() if engine}
            busy = any(not e or e.quarantined or e.waiting for e in found.values())
            if len(found) != len(self._rig.services["VllmWorker"]) or len(free) != 1 or busy:
                return False
            self._free = next(iter(free)) if self._free is None else self._free
            return free == {self._free}

        await eventually(still, _AGAIN_S)
        await self._meters.ask()
        return ", ".join(f"{name} {self._meters.total(name)}" for name in _REFUSED)

    async def prefilled_remotely(self) -> None:
        """Returns when every decode engine has got a prompt from a prefill worker since then.
        Raises TimeoutError."""
        began = time.monotonic()

        async def all_remote() -> bool:
            await asyncio.sleep(_LOOK_S)
            try:
                found = await self._remote_prefills(time.monotonic() - began)
            except DynamoLiteError:
                return False
            return len(found) == len(self._rig.services["VllmWorker"]) and all(found)

        await eventually(all_remote, _AGAIN_S)

    async def _engines(self) -> dict[str, EngineStatus | None]:
        """The decode engines. Raises DynamoLiteError."""
        async with (
            EtcdStore(self._rig.etcd.url) as store,
            NatsMessaging(self._rig.nats.url) as messaging,
        ):
            return await decode_engines(store, messaging, NAMESPACE)

    async def _remote_prefills(self, within_s: float) -> list[int]:
        """How many prompts of each decode engine were prefilled remotely of late. Raises
        DynamoLiteError."""
        asked = encode(Explain(last=_LAST, within_s=within_s))
        found: list[int] = []
        async with NatsMessaging(self._rig.nats.url) as messaging:
            for engine_id in await self._engines():
                subject = names.explain_subject(NAMESPACE, engine_id)
                said = decode_explained(await messaging.request(subject, asked, timeout_s=5.0))
                outcomes = [one.asked.outcome for one in said.decisions if one.asked is not None]
                found.append(outcomes.count("committed"))
        return found


def questions() -> list[Question]:
    """Prompts, most of which are long."""
    return [question(length, length, _TOKENS) for length in (40, 400, 900, 1500, 700)]
