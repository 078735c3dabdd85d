"""The order in which the first token comes from the prefill engine, and all others from the decode
engine (`first_token.py` joins them)."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

from dynamo_lite.forward import headers
from dynamo_lite.forward.beginning import LIMIT_BYTES
from dynamo_lite.forward.bodies import ClientRequest
from dynamo_lite.forward.engine_answer import EngineAnswer
from dynamo_lite.forward.engines import KnownEngine
from dynamo_lite.forward.events import EventReader
from dynamo_lite.forward.failures import DecodeFailed, EngineFailed, Final, PrefillFailed
from dynamo_lite.forward.first_token import FirstTokenMerge, MalformedEvent
from dynamo_lite.forward.job import ForwardJob
from dynamo_lite.forward.legs import Legs, sending
from dynamo_lite.forward.placing import EnginePlacement, Places
from dynamo_lite.forward.protocols.base import ForwardProtocol, HandoverAttempt, PrefillAnswer
from dynamo_lite.forward.protocols.one_token import plain
from dynamo_lite.forward.relay import break_off
from dynamo_lite.forward.rewriting import Changes, changes_for
from dynamo_lite.runtime.tasks import OwnedTasks, end_tasks

logger = logging.getLogger(__name__)

#: How long a decode leg without needed tokens may run, so that it receives its KV.
_SETTLE_S = 30.0

_Opening = asyncio.Task[EngineAnswer]


class MergedOrder:
    """`close` ends the work that is still done for ended requests.

    timeout_s: of a prefill leg. answered: counts answers by how and why.
    """

    def __init__(
        self,
        protocol: ForwardProtocol,
        placer: Places,
        open_legs: Callable[[ForwardJob], Legs],
        answered: Counter[tuple[str, str]],
        *,
        timeout_s: float,
    ):
        self._protocol, self._placer, self._open_legs = protocol, placer, open_legs
        self._answered, self._timeout_s = answered, timeout_s
        self._over = OwnedTasks()

    async def close(self) -> None:
        await self._over.end()

    async def run(
        self, job: ForwardJob, placement: EnginePlacement, attempt: HandoverAttempt
    ) -> None:
        """Both legs at once."""
        prefill, engine = placement.prefill, placement.decode
        assert prefill is not None and engine is not None
        body, protocol = job.request.body, self._protocol
        first = protocol.prefill(body, attempt)
        second = protocol.decode(body, attempt, None)
        merge = FirstTokenMerge(_limit(job.request))
        ends = prefill.ends
        async with self._open_legs(job) as legs:
            with engine.leg(0) as counted, prefill.leg(placement.uncached_tokens) as prompt:
                prefilling = legs.start(
                    legs.open(sending(prefill, first), PrefillFailed), "prefill leg"
                )
                decoding = legs.start(
                    legs.open(sending(engine, second), DecodeFailed), "decode leg"
                )
                changes = changes_for(first, PrefillAnswer())
                await self._first_tokens(job, legs, prefill, prefilling, decoding, merge, changes)
                prompt.answered()
                self._placer.sent(prefill, placement)
                if merge.over:
                    legs.leave_open(decoding)
                    self._over.start(_read_out(legs, engine, decoding), name="rest of a decode leg")
                    await job.client.write(merge.end())
                    return await job.client.finish()
                changes = changes_for(second, PrefillAnswer())
                legs.stays(prefill, ends, {}, streams=True)
                try:
                    await legs.all(decoding)
                    response = decoding.result()
                    counted.answered()
                    reader = legs.events(engine, response)
                    events = await legs.watched(reader.next(), "first events")
                    legs.handed_over()
                    while events:
                        if shown := merge.from_decode(changes.events(events)):
                            response.shown = True
                            await job.client.write(shown)
                        events = await reader.next()
                except (EngineFailed, Final, MalformedEvent) as exc:
                    await end_tasks(decoding)  # the client's end would interrupt it later
                    await break_off(job.client, f"decode leg: {exc}", whole=True)
                await job.client.finish()
        self._placer.sent(engine, placement)

    async def _first_tokens(
        self,
        job: ForwardJob,
        legs: Legs,
        prefill: KnownEngine,
        prefilling: _Opening,
        decoding: _Opening,
        merge: FirstTokenMerge,
        changes: Changes,
    ) -> None:
        """Raises PrefillFailed, DecodeFailed and Final before the client's first byte, Broken
        after it."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await _first_unless_second_fails(prefilling, decoding)
                response = prefilling.result()
                reader = legs.events(prefill, response, PrefillFailed)
                if not await self._show(job, reader, response, merge, decoding, changes):
                    raise PrefillFailed(prefill, "unpaired", "no token")
        except MalformedEvent as exc:
            failure = PrefillFailed(prefill, "malformed", str(exc))
            await _break_off_if_started(job, failure, exc)
        except TimeoutError as exc:
            failure = PrefillFailed(prefill, "timeout", f"after {self._timeout_s:g} s")
            await _break_off_if_started(job, failure, exc)
        except (PrefillFailed, Final) as exc:
            await _break_off_if_started(job, exc, exc)

    async def _show(
        self,
        job: ForwardJob,
        reader: EventReader,
        response: EngineAnswer,
        merge: FirstTokenMerge,
        decoding: _Opening,
        changes: Changes,
    ) -> bool:
        """Returns whether there was a token. What comes before the first one is held back: until
        then, another engine can be asked."""
        client, held = job.client, b""
        while events := await reader.next_without_error():
            held += merge.from_prefill(changes.events(events))
            if not held or not (merge.begun or len(held) > LIMIT_BYTES):
                continue
            if not client.started:
                if decoding.done():
                    decoding.result()  # raises its failure while another engine can be asked
                self._answered["disaggregated", ""] += 1
                job.note.how = "disaggregated"
                head = headers.to_client(response.headers)
                head.popall("content-length", None)
                response.shown = True
                await client.start(200, head)
            shown, held = held, b""
            await client.write(shown)
        return client.started


def _limit(request: ClientRequest) -> int | None:
    """The client's limit on tokens."""
    for key in ("max_completion_tokens", "max_tokens"):
        value = plain(request.body.get(key))
        if isinstance(value, int):
            return value
    return None


async def _first_unless_second_fails(first: _Opening, second: _Opening) -> None:
    """Waits for the first. Raises what either has raised."""
    await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
    if second.done() and not first.done():
        second.result()
        await asyncio.wait({first})
    first.result()


async def _break_off_if_started(
    job: ForwardJob, failure: PrefillFailed | Final, cause: BaseException
) -> None:
    if job.client.started:
        await break_off(job.client, str(failure), whole=True)
    raise failure from cause


async def _read_out(legs: Legs, engine: KnownEngine, decoding: _Opening) -> None:
    """Reads a leg without needed tokens to its end. The decode engine must receive the KV, or
    the prefill engine would keep it."""
    try:
        async with asyncio.timeout(_SETTLE_S):
            response = await decoding
            try:
                await legs.whole(engine, response, DecodeFailed)
            finally:
                response.close()
    except (TimeoutError, EngineFailed, Final) as exc:
        logger.debug("the rest of a decode leg: %s", exc)
    finally:
        await end_tasks(decoding)
