"""Which engines take one attempt of a request."""

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dynamo_lite.forward.bodies import ClientRequest
from dynamo_lite.forward.choosing import (
    EngineChooser,
    SentPrompts,
    no_prefill_reason,
    text_chain,
    tokens_of,
)
from dynamo_lite.forward.engines import KnownEngine, KnownEngines
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
    #: Of the present attempt, one for each leg.
    choices: list[LegChoice] = field(default_factory=list[LegChoice])

    def chose(self, choice: LegChoice) -> None:
        """A leg may be chosen twice: the last choice counts."""
        others = [one for one in self.choices if one.leg != choice.leg]
        self.choices[:] = [choice, *others] if choice.leg == "prefill" else [*others, choice]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlacement:
    """The engines of one attempt."""

    #: None: the decode engine computes the prompt.
    prefill: KnownEngine | None
    decode: KnownEngine
    #: Why there is no prefill leg.
    alone: str = ""
    chain: Sequence[ChainHash] = ()
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
        if not alone and not prefilling:
            alone = "no_prefill_worker"
        # A request that is passed on unchanged may go to every engine.
        passed = not request.route or alone == "no_header"
        without = bool(alone) and not passed
        decode = self._choose_decode(tried, matched, alone, able_alone=without)
        prefilling = [engine for engine in prefilling if engine is not decode]
        alone = alone or self._not_worth_it(decode, len(prefilling), matched, tokens)
        if alone and not passed and not decode.decodes_alone:
            decode = self._choose_decode(tried, matched, alone, able_alone=True)
        prefill = None if alone else self._choose("prefill", prefilling, matched, tried)
        again = prefill is not None and self._protocol.staged
        self._took(one for one in tried.choices if not (again and one.leg == "decode"))
        return EnginePlacement(
            prefill=prefill,
            decode=decode,
            alone=alone,
            chain=chain,
            prompt_tokens=tokens,
            # The sent prompts are known in pieces of an assumed length, so the sum may exceed the
            # prompt.
            uncached_tokens=max(0, tokens - (matched.get(prefill.number, 0) if prefill else 0)),
        )

    def place_decode(self, placement: EnginePlacement, tried: Tried) -> KnownEngine:
        """Raises NoWorkers."""
        without = Tried(decode=set(tried.decode), choices=tried.choices)
        if placement.prefill is not None:
            without.decode.add(placement.prefill.number)
        engine = self._choose_decode(without, self._sent.matched(placement.chain), "")
        self._took(one for one in tried.choices if one.leg == "decode")
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
        if tried.named is None:
            return self._engines.prefilling(tried.prefill)
        able = (e for e in tried.named if e.can_prefill and e.number not in tried.prefill)
        return list(itertools.islice(able, 1))

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

    def _not_worth_it(
        self, decode: KnownEngine, prefilling: int, matched: Mapping[int, int], tokens: int
    ) -> str:
        if not self._protocol.decodes_alone and not decode.decodes_alone:
            return "" if prefilling else "no_prefill_worker"
        return no_prefill_reason(
            prompt_tokens=tokens,
            cached_tokens=matched.get(decode.number, 0),
            prefill_engines=prefilling,
            max_local_prefill_length=self._limit,
        )

    def _choose_decode(
        self, tried: Tried, matched: Mapping[int, int], alone: str, *, able_alone: bool = False
    ) -> KnownEngine:
        """What it holds counts where it computes the prompt, or may: else the KV comes from the
        prefill engine. able_alone: whether it must be able to do without."""
        able = self._engines.decoding(tried.decode, alone=able_alone)
        if not able:
            raise NoWorkers(self._missing(tried, alone=able_alone))
        by_prefix = bool(alone or self._limit)
        return self._choose("decode", able, matched, tried, by_prefix=by_prefix)

    def _choose(
        self,
        leg: str,
        able: Sequence[KnownEngine],
        matched: Mapping[int, int],
        tried: Tried,
        *,
        by_prefix: bool = True,
    ) -> KnownEngine:
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
        tried.chose(choice)
        return next(engine for engine in able if engine.name == choice.engine)

    def _took(self, choices: Iterable[LegChoice]) -> None:
        """These choices are the last ones for their legs."""
        for one in choices:
            self.choices[one.leg, one.reason] += 1
            self._chooser.took(one)

    def _missing(self, tried: Tried, *, alone: bool) -> str:
        """The text contains no addresses, because a client reads it."""
        if not any(engine.usable for engine in self._engines.all if engine.decodes):
            return "no decode engine is healthy"
        if alone:
            return "no healthy engine can answer this request without a prefill engine"
        return "no other decode engine is healthy"
