"""One attempt of a request: its legs in the protocol's order, and its answer to the client."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp

from dynamo_lite.forward import headers
from dynamo_lite.forward.bodies import Request
from dynamo_lite.forward.client import Client, Incoming
from dynamo_lite.forward.engines import Engine, EngineLeg
from dynamo_lite.forward.failures import DecodeFailed, EngineFailed, PrefillFailed
from dynamo_lite.forward.first_token import FirstTokenMerge
from dynamo_lite.forward.legs import ERROR_EVENTS, Legs, Sending, sending
from dynamo_lite.forward.placing import Placement, Placer, Tried
from dynamo_lite.forward.protocols.base import (
    Attempt,
    ForwardProtocol,
    Leg,
    PrefillAnswer,
)
from dynamo_lite.forward.protocols.one_token import plain
from dynamo_lite.forward.relay import break_off, relay
from dynamo_lite.forward.rewriting import UNCHANGED, Changes, EventCutter
from dynamo_lite.forward.usage import cached_by_prefill
from dynamo_lite.runtime.tasks import OwnedTasks, end_tasks

logger = logging.getLogger(__name__)

#: How long a decode engine gets to take over a request whose client is gone. It then tells the
#: prefill engine that the KV is not needed; without that the blocks wait for the end of a lease.
LET_GO_S = 1.0
#: How long a decode leg whose tokens are not needed may run, so that it receives its KV.
_SETTLE_S = 30.0


@dataclass(slots=True, kw_only=True)
class Job:
    """One request on its way."""

    incoming: Incoming
    request: Request
    client: Client
    tried: Tried = field(default_factory=Tried)
    #: Decode engines that failed.
    failed: int = 0


class Orders:
    """Async context manager; what is still done for requests that are over ends with it.

    timeout_s: of a prefill leg. answered: counts answers by how and why.
    """

    def __init__(
        self,
        protocol: ForwardProtocol,
        placer: Placer,
        open_legs: Callable[[Incoming], Legs],
        answered: Counter[tuple[str, str]],
        *,
        timeout_s: float,
    ):
        self._protocol, self._placer, self._open_legs = protocol, placer, open_legs
        self._answered, self._timeout_s = answered, timeout_s
        self._over = OwnedTasks()

    async def close(self) -> None:
        await self._over.end()

    async def alone(self, job: Job, placement: Placement) -> None:
        """No prefill leg: the decode engine gets the client's own body."""
        engine = placement.decode
        assert engine is not None
        request = job.request
        async with self._open_legs(job.incoming) as legs:
            with engine.leg(placement.prompt_tokens) as leg:
                passed = not request.route
                response = await legs.open(
                    Sending(engine, request.data or None), DecodeFailed, passes_errors=passed
                )
                how = ("passed", "") if passed else ("alone", placement.alone)
                await self._relay(job, engine, legs, response, leg, how)
        self._placer.sent(engine, placement)

    async def single(self, job: Job, placement: Placement, attempt: Attempt) -> None:
        """The decode engine asks the prefill engine itself."""
        prefill, engine = _pair(placement)
        leg = self._protocol.decode(job.request.body, attempt, None)
        async with self._open_legs(job.incoming) as legs:
            with engine.leg(0) as counted, prefill.leg(placement.uncached_tokens) as prompt:
                try:
                    response = await legs.open(sending(engine, leg), DecodeFailed)
                    await self._relay(job, engine, legs, response, counted, also=prompt)
                except DecodeFailed:
                    # It does not say which of the two engines has failed.
                    job.tried.prefill.add(prefill.number)
                    raise
        self._placer.sent(prefill, placement)
        self._placer.sent(engine, placement)

    async def serial(self, job: Job, placement: Placement, attempt: Attempt) -> None:
        """The decode leg gets what the prefill leg has answered."""
        prefill, protocol = placement.prefill, self._protocol
        assert prefill is not None
        first = protocol.prefill(job.request.body, attempt)
        async with self._open_legs(job.incoming) as legs:
            with prefill.leg(placement.uncached_tokens):
                answer = await self._prefill(legs, sending(prefill, first), attempt)
            self._placer.sent(prefill, placement)
            engine = placement.decode
            if engine is None or not engine.usable:
                engine = self._placer.place_decode(placement, job.tried)
            handoff = protocol.extract(answer)
            if handoff is None:
                return await self._without_handoff(job, placement, engine, legs)
            second = protocol.decode(job.request.body, attempt, handoff)
            changes = self._changes(attempt, second, answer)
            with engine.leg(0) as counted:
                response = await self._hand_over(legs, sending(engine, second))
                await self._relay(job, engine, legs, response, counted, changes=changes)
        self._placer.sent(engine, placement)

    async def parallel(self, job: Job, placement: Placement, attempt: Attempt) -> None:
        """Both legs at once. The decode engine's bytes are held until the prefill leg has
        succeeded: without its KV they are worth nothing."""
        prefill, engine = _pair(placement)
        body, protocol = job.request.body, self._protocol
        first = protocol.prefill(body, attempt)
        second = protocol.decode(body, attempt, None)
        streams = protocol.prefill_streams and job.request.stream
        async with self._open_legs(job.incoming) as legs:
            with engine.leg(0) as counted, prefill.leg(placement.uncached_tokens) as prompt:
                prefilling = legs.start(
                    self._prefill(legs, sending(prefill, first), attempt, streams=streams),
                    "prefill leg",
                )
                decoding = legs.start(
                    legs.open(sending(engine, second), DecodeFailed), "decode leg"
                )
                await legs.all(prefilling, decoding)
                answer, response = prefilling.result(), decoding.result()
                prompt.answered()
                self._placer.sent(prefill, placement)
                changes = self._changes(attempt, second, answer)
                await self._relay(job, engine, legs, response, counted, changes=changes)
        self._placer.sent(engine, placement)

    async def merged(self, job: Job, placement: Placement, attempt: Attempt) -> None:
        """Both legs at once, and the first token from the prefill engine."""
        prefill, engine = _pair(placement)
        body = job.request.body
        first = self._protocol.prefill(body, attempt)
        second = self._protocol.decode(body, attempt, None)
        merge = FirstTokenMerge(_limit(job.request))
        async with self._open_legs(job.incoming) as legs:
            with engine.leg(0) as counted, prefill.leg(placement.uncached_tokens) as prompt:
                prefilling = legs.start(
                    legs.open(sending(prefill, first), PrefillFailed), "prefill leg"
                )
                decoding = legs.start(
                    legs.open(sending(engine, second), DecodeFailed), "decode leg"
                )
                changes = self._changes(attempt, first, PrefillAnswer())
                try:
                    async with asyncio.timeout(self._timeout_s):
                        await _first_unless_second_fails(prefilling, decoding)
                        reader = _Events(legs, prefill, prefilling.result(), PrefillFailed, changes)
                        await self._first_tokens(job, reader, merge, decoding)
                except TimeoutError as exc:
                    failure = PrefillFailed(prefill, "timeout", f"after {self._timeout_s:g} s")
                    await _break_off_if_started(job, failure, exc)
                except PrefillFailed as exc:
                    await _break_off_if_started(job, exc, exc)
                prompt.answered()
                self._placer.sent(prefill, placement)
                if merge.over:
                    await job.client.write(merge.end())
                    await job.client.finish()
                    # It has to receive the KV, or the prefill engine would keep it.
                    return await _read_out(legs, engine, decoding)
                changes = self._changes(attempt, second, PrefillAnswer())
                try:
                    reader = _Events(legs, engine, await decoding, DecodeFailed, changes)
                    counted.answered()
                    while events := await reader.next():
                        if shown := merge.from_decode(events):
                            await job.client.write(shown)
                except DecodeFailed as exc:
                    await break_off(job.client, exc, whole=True)
                await job.client.finish()
        self._placer.sent(engine, placement)

    async def _first_tokens(
        self,
        job: Job,
        reader: "_Events",
        merge: FirstTokenMerge,
        decoding: "asyncio.Task[aiohttp.ClientResponse]",
    ) -> None:
        client = job.client
        while events := await reader.next():
            if not client.started and events.startswith(ERROR_EVENTS):
                raise PrefillFailed(reader.engine, "event")
            shown = merge.from_prefill(events)
            if not shown:
                continue
            if not client.started:
                if decoding.done():
                    decoding.result()  # raises its failure while another engine can be asked
                self._answered["disaggregated", ""] += 1
                await client.start(200, headers.to_client(reader.response.headers))
            await client.write(shown)
        if not client.started:
            raise PrefillFailed(reader.engine, "unpaired", "no token")

    async def _without_handoff(
        self, job: Job, placement: Placement, engine: Engine, legs: Legs
    ) -> None:
        assert placement.prefill is not None
        logger.info("engine %s has handed nothing over", placement.prefill.name)
        with engine.leg(placement.prompt_tokens) as counted:
            response = await legs.open(Sending(engine, job.request.data), DecodeFailed)
            await self._relay(job, engine, legs, response, counted, ("alone", "no_handoff"))
        self._placer.sent(engine, placement)

    async def _hand_over(self, legs: Legs, one: Sending) -> aiohttp.ClientResponse:
        """Opens the decode leg. If the client goes meanwhile, the engine still gets the request,
        and a moment to take it over, before its connection is closed."""
        opening = asyncio.create_task(legs.open(one, DecodeFailed), name="decode leg")
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            self._over.start(_let_go(opening), name="let go")
            raise

    async def _prefill(
        self, legs: Legs, one: Sending, attempt: Attempt, *, streams: bool = False
    ) -> PrefillAnswer:
        """A prefill leg. Raises PrefillFailed also if another process has answered than the one
        that the decode engine waits for."""
        answer = await legs.prefill(one, streams=streams)
        if not self._protocol.needs_identity:
            return answer
        learned, expected = self._protocol.learn(answer), attempt.prefill.identity
        one.engine.identity = learned
        if expected is not None and learned != expected:
            text = "it was restarted, or handed nothing over"
            raise PrefillFailed(one.engine, "unpaired", text)
        return answer

    def _changes(self, attempt: Attempt, leg: Leg, answer: PrefillAnswer) -> Changes:
        """What has to change in the answer of this leg."""
        cached = cached_by_prefill(answer)
        hidden = None
        if self._protocol.hides_ids:
            hidden = (leg.headers["x-request-id"].encode(), attempt.unique.encode())
        if cached is None and hidden is None:
            return UNCHANGED
        return Changes(cached_tokens=cached, hidden=hidden)

    async def _relay(
        self,
        job: Job,
        engine: Engine,
        legs: Legs,
        response: aiohttp.ClientResponse,
        leg: EngineLeg,
        how: tuple[str, str] = ("disaggregated", ""),
        *,
        changes: Changes = UNCHANGED,
        also: EngineLeg | None = None,
    ) -> None:
        def on_first() -> None:
            self._answered[how] += 1
            leg.answered()
            if also is not None:
                also.answered()

        await relay(job.client, legs, engine, response, changes=changes, on_first=on_first)


class _Events:
    """Reads whole events of one leg."""

    def __init__(
        self,
        legs: Legs,
        engine: Engine,
        response: aiohttp.ClientResponse,
        failed: type[EngineFailed],
        changes: Changes,
    ):
        self.engine, self.response = engine, response
        self._legs, self._failed, self._changes = legs, failed, changes
        self._cutter = EventCutter()

    async def next(self) -> bytes:
        """Empty at the end. Raises `failed`."""
        while data := await self._legs.some(self.engine, self.response, self._failed):
            if events := self._cutter.feed(data):
                return self._changes.events(events)
        return self._changes.events(self._cutter.flush())


def _pair(placement: Placement) -> tuple[Engine, Engine]:
    assert placement.prefill is not None and placement.decode is not None
    return placement.prefill, placement.decode


def _limit(request: Request) -> int | None:
    """The client's limit on tokens."""
    for key in ("max_completion_tokens", "max_tokens"):
        value = plain(request.body.get(key))
        if isinstance(value, int):
            return value
    return None


async def _first_unless_second_fails(
    first: "asyncio.Task[aiohttp.ClientResponse]", second: "asyncio.Task[aiohttp.ClientResponse]"
) -> None:
    """Waits for the first. Raises what either has raised."""
    await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
    if second.done() and not first.done():
        second.result()
        await asyncio.wait({first})
    first.result()


async def _break_off_if_started(job: Job, failure: PrefillFailed, cause: BaseException) -> None:
    if job.client.started:
        await break_off(job.client, str(failure), whole=True)
    raise failure from cause


async def _read_out(
    legs: Legs, engine: Engine, decoding: "asyncio.Task[aiohttp.ClientResponse]"
) -> None:
    try:
        async with asyncio.timeout(_SETTLE_S):
            await legs.whole(engine, await decoding, DecodeFailed)
    except (TimeoutError, EngineFailed) as exc:
        logger.debug("the rest of a decode leg: %s", exc)


async def _let_go(opening: "asyncio.Task[aiohttp.ClientResponse]") -> None:
    await asyncio.wait({opening}, timeout=LET_GO_S)
    if not opening.done():
        await end_tasks(opening)
    elif opening.exception() is None:
        opening.result().close()
