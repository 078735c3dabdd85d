"""One try of a request: its legs are sent, read, noted, and closed in any case.

An engine aborts a request whose connection is closed before the end of its answer.
"""

import asyncio
import math
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec
from multidict import CIMultiDict

from dynamo_lite.forward import headers
from dynamo_lite.forward.bodies import ClientRequest
from dynamo_lite.forward.client import Answer, Client
from dynamo_lite.forward.connection import EngineAnswer
from dynamo_lite.forward.decision_log import ForwardDecisionLog, RequestNote
from dynamo_lite.forward.engines import KnownEngine
from dynamo_lite.forward.events import without_error
from dynamo_lite.forward.failures import Final, LegFailed, LegKind, refused
from dynamo_lite.forward.first_token import FirstTokenMerge
from dynamo_lite.forward.health import KnownEngines
from dynamo_lite.forward.metrics import ForwardStats
from dynamo_lite.forward.options import ForwarderConfig
from dynamo_lite.forward.placing import EnginePlacement, Placer, Tried
from dynamo_lite.forward.protocols.base import HandoverAttempt, Leg, LegOrder, Params
from dynamo_lite.forward.protocols.one_token import NO_PARAMS, object_of, params_of
from dynamo_lite.forward.protocols.registry import PROTOCOLS
from dynamo_lite.forward.upstream import Upstream
from dynamo_lite.protocol.forwarding import ForwardAttempt, LegTaken

#: With one of these statuses the decode engine may have failed, not the request.
_RETRIED = frozenset({500, 502, 503, 504})
#: How long after its prefill leg an answer in one piece depends on the prefill engine: its first
#: byte comes after all tokens, so it does not tell when the KV has arrived.
_WHOLE_S = 60.0


class ForwardParts:
    """What all requests use. Async context manager: while it lasts, engines are checked. by_load:
    whether engines are chosen, and not named by clients."""

    def __init__(self, config: ForwarderConfig, *, by_load: bool = True):
        self.config, self.protocol = config, PROTOCOLS[config.protocol]
        self.stats, self.decisions = ForwardStats(), ForwardDecisionLog()
        self.upstream = Upstream(config.idle_timeout_s)
        every_s = config.health_interval_s
        self.engines = KnownEngines(
            config.engines, self.protocol, self.upstream, every_s, by_load=by_load
        )
        self.placer = Placer(self.engines, config)
        #: Finds the prefill engines whose HOST:PORT a client has named, or raises Final; None:
        #: engines are chosen here.
        self.named: Callable[[Sequence[str]], Awaitable[Sequence[KnownEngine]]] | None = None

    async def __aenter__(self) -> Self:
        for engine in self.engines.all:
            self.engines.follow(engine)
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self.engines.end()
        finally:
            await self.upstream.aclose()

    def facts(self) -> dict[str, Any]:
        """For `/health`."""
        engines = self.engines.all
        return {
            "ok": any(engine.decodes and engine.usable for engine in engines),
            "protocol": self.protocol.name,
            "engines": {
                engine.name: {
                    "role": engine.options.role,
                    "trouble": engine.trouble or engine.misfit,
                    **({"lease": engine.lease} if engine.lease else {}),
                }
                for engine in engines
            },
            "requests": self.stats.in_flight,
        }


@dataclass(slots=True, kw_only=True)
class ForwardJob:
    """One request in flight, the client that gets its answer, and what it has tried."""

    method: str
    #: Path with the query, encoded; begins with a slash.
    path: str
    #: Of `headers.to_engine`.
    headers: CIMultiDict[str]
    #: Of `headers.client_id`.
    client_id: str
    request: ClientRequest
    client: Client
    #: For `explain`.
    note: RequestNote
    tried: Tried = field(default_factory=Tried)


class RequestAttempt:
    """Context manager: at its end all legs are closed."""

    #: Only with a prefill leg.
    prefill: KnownEngine
    ids: HandoverAttempt

    def __init__(self, parts: ForwardParts, job: ForwardJob, placement: EnginePlacement):
        self.parts, self.job, self.placement = parts, job, placement
        self.order: LegOrder = "alone"
        told = ForwardAttempt(alone=placement.alone, choices=placement.choices)
        request_id = ""
        if placement.prefill is not None:
            self.prefill = placement.prefill
            sequences = job.request.sequences if parts.protocol.batches else 1
            self.ids = HandoverAttempt(
                route=job.request.route,
                unique=secrets.token_hex(16),
                client_id=job.client_id,
                rooms=tuple(secrets.randbits(63) for _ in range(sequences)),
                prefill=self.prefill.peer,
                decode=placement.decode.peer,
            )
            self.order = told.order = parts.protocol.order_for(self.prefill.peer)
            request_id = self.ids.request_id
        job.note.tries(told, placement.prompt_tokens, request_id)
        #: Set where the client's first token comes from the prefill leg: its events.
        self.merge: FirstTokenMerge | None = None
        self.first_events = b""
        #: When the prefill leg ended, in the loop's time.
        self._prefilled_at = math.inf
        self._taken: dict[LegKind, LegTaken] = {}
        self._responses: dict[LegKind, EngineAnswer] = {}
        #: Why the decode engine would wait for the prefill engine's KV in vain.
        self._vain: LegFailed | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, why: BaseException | None, __: object) -> None:
        failed = why if isinstance(why, LegFailed) else None
        if self.placement.prefill is not None:
            self.prefill.on_end.discard(self._prefill_ended)
        for response in self._responses.values():
            response.close()
        for leg in ("prefill", "decode"):
            self.parts.placer.released(self.placement, leg)
        for kind, taken in self._taken.items():
            how = failed.kind if failed is not None and failed.leg == kind else ""
            self.job.note.leg_ends(taken, how)

    def begins(self) -> None:
        """The client gets its first byte: all engines hold the prompt."""
        how, reason = "disaggregated", self.placement.alone
        if reason:
            how, reason = ("alone", reason) if self.job.request.route else ("passed", "")
        self.parts.stats.answered[how, reason] += 1
        self.job.note.message.how, self.job.note.message.reason = how, reason
        for leg in ("prefill", "decode"):
            self.parts.placer.computed(self.placement, leg)

    async def open(
        self, engine: KnownEngine, kind: LegKind, leg: Leg | None = None
    ) -> EngineAnswer:
        """Returns the head of a successful answer, without the leg's hidden id. Raises LegFailed,
        and Final with the engine's answer for a 4xx, and for any error on a route that is passed
        on. leg: None: the client's own body and headers."""
        job, note, prefill = self.job, self.job.note, kind == "prefill"
        taken = self._taken[kind] = note.leg_begins(kind, engine.name)
        data = job.request.data if leg is None else msgspec.json.encode(leg.body)
        leg = leg or Leg({})
        head = job.headers.copy()
        head.update(leg.headers)
        try:
            response = self._responses[kind] = await self.parts.upstream.send(
                engine, kind, job.method, job.path, head, data or None
            )
            if self._vain is not None:
                response.fail(self._vain)
            await response.head()
        except LegFailed as exc:
            # A broken connection does not count: an engine may close an idle one.
            if exc.kind == "refused":
                self.parts.engines.failed(engine, exc)
            raise
        status = response.status
        taken.status, taken.head_s = status, note.age_s - taken.after_s
        if leg.hidden is not None:
            headers.hide(response.headers, *leg.hidden)
        if status < 300 or (status < 400 and not prefill):
            return response
        head = headers.to_client(response.headers, engine.name)
        answer = Answer(status, head, leg.shows(await response.read()))
        if job.method != "HEAD":
            head["content-length"] = str(len(answer.body))
        if 400 <= status < 500:
            raise refused(engine, kind, answer)
        if not (job.request.route and (prefill or status in _RETRIED)):
            raise Final(answer)
        raise LegFailed(engine, kind, "status", str(status), answer)

    async def prefilled(self) -> Params:
        """The whole prefill leg. Raises Final, and LegFailed also if another process has answered
        than the one that the decode engine waits for, or an engine of another protocol."""
        engine, protocol = self.prefill, self.parts.protocol
        leg = protocol.prefill(self.job.request.body, self.ids)
        within_s = self.parts.config.prefill_timeout_s
        try:
            async with asyncio.timeout(within_s):
                response = await self.open(engine, "prefill", leg)
                events = await without_error(response) if response.is_stream else b""
                data = await response.read()
            if self.merge is not None:
                self.first_events = self.merge.from_prefill(leg.shows(events))
                if not self.merge.begun:
                    raise LegFailed(engine, "prefill", "unpaired", "no token")
            self.job.note.leg_ends(self._taken["prefill"])
            self._prefilled_at = asyncio.get_running_loop().time()
            params = NO_PARAMS if response.is_stream else params_of(data)
        except TimeoutError as exc:
            detail = f"no whole answer within {within_s:g} s"
            raise LegFailed(engine, "prefill", "timeout", detail) from exc
        except (ValueError, RecursionError) as exc:
            raise LegFailed(engine, "prefill", "malformed", type(exc).__name__) from exc
        mode = (object_of(params) or {}).get("transfer_mode")
        if protocol.transfer_mode and mode not in (None, protocol.transfer_mode):
            misfit = (
                f"it hands over with transfer_mode {str(mode)[:20]!r}, not"
                f" {protocol.transfer_mode!r}: choose the protocol here, nixl or nixl-push, by the"
                " engines' connector, NixlConnector or NixlPushConnector"
            )
            engine.unfit(misfit)
            raise LegFailed(engine, "prefill", "unpaired", misfit)
        if protocol.learn is not None:
            learned, expected = protocol.learn(params), self.ids.prefill.identity
            engine.learned(learned)
            if expected is not None and learned != expected:
                text = "another process or data-parallel rank has answered, or handed nothing over"
                raise LegFailed(engine, "prefill", "unpaired", text)
        self.parts.placer.computed(self.placement, "prefill")
        self.parts.placer.released(self.placement, "prefill")
        return params

    def depends(self) -> None:
        """From now on the decode leg fails when the prefill engine ends before the client has a
        part of it: the decode engine would wait for the KV until a timeout."""
        self.prefill.on_end.add(self._prefill_ended)

    def _prefill_ended(self, why: str, refuses: bool) -> None:
        since_s = asyncio.get_running_loop().time() - self._prefilled_at
        if not self.job.request.stream and since_s > _WHOLE_S:
            return
        text = f"it has ended or was restarted before its KV was taken over: {why}"
        self._vain = LegFailed(self.prefill, "prefill", "broken", text)
        response = self._responses.get("decode")
        if response is not None and not response.shown:
            response.fail(self._vain)
