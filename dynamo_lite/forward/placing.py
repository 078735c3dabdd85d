"""Which engines take one attempt of a request."""

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from dynamo_lite.forward.bodies import ClientRequest
from dynamo_lite.forward.choosing import (
    EngineChooser,
    SentPrompts,
    no_prefill_reason,
    text_chain,
    tokens_of,
)
from dynamo_lite.forward.engines import KnownEngine
from dynamo_lite.forward.health import KnownEngines
from dynamo_lite.forward.options import ForwarderConfig
from dynamo_lite.protocol.errors import NoWorkers
from dynamo_lite.protocol.forwarding import LegCandidate, LegChoice
from dynamo_lite.routing.kv_chain import ChainHash
from dynamo_lite.routing.worker_loads import REQUEST_LOAD_TOKENS


class CannotServe(Exception):
    """None of the configured engines could ever answer this request."""


@dataclass(slots=True, kw_only=True)
class Tried:
    """The engines that a request has tried so far; the workflow fills it in."""

    prefill: set[int] = field(default_factory=set[int])
    decode: set[int] = field(default_factory=set[int])
    #: Why the request gets no further prefill leg.
    alone: str = ""
    #: Prefill engines that the client has named; None: any.
    named: Sequence[KnownEngine] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlacement:
    """The engines of one attempt."""

    #: None: the decode engine computes the prompt.
    prefill: KnownEngine | None
    decode: KnownEngine
    #: Why there is no prefill leg.
    alone: str
    choices: list[LegChoice]
    chain: Sequence[ChainHash]
    prompt_tokens: int
    #: Tokens of the prompt that are not assumed to be in the prefill engine's cache.
    uncached_tokens: int


class Placer:
    """Chooses engines and remembers which prompts they were sent."""

    def __init__(self, engines: KnownEngines, config: ForwarderConfig, sent: SentPrompts):
        self.choices: Counter[tuple[str, str]] = Counter()
        self._engines, self._protocol, self._sent = engines, engines.protocol, sent
        self._limit = config.max_local_prefill_length
        self._chooser = EngineChooser()

    def place(self, request: ClientRequest, tried: Tried) -> EnginePlacement:
        """Raises NoWorkers, CannotServe."""
        # Where the client chooses, it does not matter what engines hold.
        chain = text_chain(request.prompt) if tried.named is None else []
        matched, tokens = self._sent.matched(chain), tokens_of(request.prompt)
        alone = tried.alone or self._alone(request, tried)
        prefilling = [] if alone else self._prefilling(tried)
        if not prefilling:
            alone = alone or "no_prefill_worker"
        # A request that is passed on unchanged may go to every engine.
        computes = bool(alone and request.route and alone != "no_header")
        decode, choice = self._choose_decode(tried.decode, matched, alone, computes=computes)
        prefilling = [engine for engine in prefilling if engine is not decode]
        if not alone and decode.decodes_alone:
            alone = no_prefill_reason(
                prompt_tokens=tokens,
                cached_tokens=matched.get(decode.number, 0),
                prefill_engines=len(prefilling),
                max_local_prefill_length=self._limit,
            )
        prefill, choices = None, [choice]
        if not alone:
            prefill, first = self._choose("prefill", prefilling, matched)
            # A staged decode leg is placed later; only then the choice counts.
            choices = [first] if self._protocol.staged else [first, choice]
        for one in choices:
            self._took(one)
        return EnginePlacement(
            prefill=prefill,
            decode=decode,
            alone=alone,
            choices=choices,
            chain=chain,
            prompt_tokens=tokens,
            # The sent prompts are known in pieces of an assumed length, so the sum may exceed the
            # prompt.
            uncached_tokens=max(0, tokens - (matched.get(prefill.number, 0) if prefill else 0)),
        )

    def place_decode(self, placement: EnginePlacement, tried: Tried) -> KnownEngine:
        """After the prefill leg. Raises NoWorkers."""
        without = tried.decode
        if placement.prefill is not None:
            without = without | {placement.prefill.number}
        engine, choice = self._choose_decode(without, self._sent.matched(placement.chain), "")
        placement.choices[:] = [one for one in placement.choices if one.leg == "prefill"] + [choice]
        self._took(choice)
        return engine

    def sent(self, engine: KnownEngine, placement: EnginePlacement) -> None:
        if not engine.left:
            self._sent.sent(engine.number, placement.chain)

    def forget(self, engine: KnownEngine) -> None:
        """The engine has left."""
        self._sent.forget(engine.number)
        self._chooser.forget(engine.name)

    def _prefilling(self, tried: Tried) -> list[KnownEngine]:
        """Of several that the client has named, the first."""
        among = self._engines.all if tried.named is None else tried.named
        able = [e for e in among if e.can_prefill and e.number not in tried.prefill]
        return able if tried.named is None else able[:1]

    def _alone(self, request: ClientRequest, tried: Tried) -> str:
        """Raises CannotServe."""
        if tried.named is not None and not tried.named:
            return "no_header"
        reason, engines = request.alone, self._engines.all
        if request.route not in self._protocol.routes:
            reason = "route"
        elif request.batch and not self._protocol.batches:
            reason = request.batch
        if reason and request.route and engines and not any(e.decodes_alone for e in engines):
            raise CannotServe(
                f"{request.route} with {reason} needs an engine that prefills and decodes; with"
                f" {self._protocol.name} none of these engines does"
            )
        return reason

    def _choose_decode(
        self,
        without: Set[int],
        matched: Mapping[int, int],
        alone: str,
        *,
        computes: bool = False,
    ) -> tuple[KnownEngine, LegChoice]:
        """What it holds counts where it computes the prompt, or may: else the KV comes from the
        prefill engine. computes: whether it must be able to."""
        decoding = [e for e in self._engines.all if e.decodes and e.usable]
        able = [
            e for e in decoding if e.number not in without and (e.decodes_alone or not computes)
        ]
        if able:
            return self._choose("decode", able, matched, by_prefix=bool(alone or self._limit))
        # These texts contain no addresses, because a client reads them.
        if not decoding:
            raise NoWorkers("no decode engine is healthy")
        if computes:
            raise NoWorkers("no healthy engine can answer this request without a prefill engine")
        raise NoWorkers("no other decode engine is healthy")

    def _choose(
        self,
        leg: str,
        able: Sequence[KnownEngine],
        matched: Mapping[int, int],
        *,
        by_prefix: bool = True,
    ) -> tuple[KnownEngine, LegChoice]:
        candidates = [
            LegCandidate(
                engine=engine.name,
                matched_tokens=matched.get(engine.number, 0),
                load_tokens=engine.waiting_tokens + engine.requests * REQUEST_LOAD_TOKENS,
                kv_usage=engine.kv_usage,
            )
            for engine in able
        ]
        choice = self._chooser.choose(leg, candidates, by_prefix=by_prefix)
        return next(engine for engine in able if engine.name == choice.engine), choice

    def _took(self, choice: LegChoice) -> None:
        self.choices[choice.leg, choice.reason] += 1
        self._chooser.took(choice)
