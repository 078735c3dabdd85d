"""Which engines take one attempt of a request.

The choice is that of the KV-aware router (`routing/worker_loads.py`). What differs is what is
known: an engine is assumed to hold the prompts that this process sent to it.
"""

import itertools
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from dynamo_lite.forward.bodies import ClientRequest
from dynamo_lite.forward.client import error
from dynamo_lite.forward.engines import KnownEngine
from dynamo_lite.forward.failures import RETRY_AFTER
from dynamo_lite.forward.health import KnownEngines
from dynamo_lite.forward.options import ForwarderConfig
from dynamo_lite.forward.prompts import BLOCK_TOKENS, text_chain, tokens_of
from dynamo_lite.protocol.forwarding import LegChoice
from dynamo_lite.protocol.options import KvRoutingOptions
from dynamo_lite.routing.kv_chain import ChainHash
from dynamo_lite.routing.worker_loads import OwnRequest

_KV_WEIGHT = KvRoutingOptions().kv_weight


class NoEngine(Exception):
    """No engine can take the request now, or none ever could. Its text contains no addresses,
    because the client reads it."""

    def __init__(self, text: str, *, ever: bool = True):
        super().__init__(text)
        self.answer = error(501, "NotImplementedError", text)
        if ever:
            again = f"{text}; try again later"
            self.answer = error(503, "ServiceUnavailableError", again, RETRY_AFTER)


@dataclass(slots=True, kw_only=True)
class Tried:
    """What a request has tried so far; the workflow fills it in."""

    #: Engines that failed, by number.
    prefill: set[int] = field(default_factory=set[int])
    decode: set[int] = field(default_factory=set[int])
    #: Decode legs that failed.
    failed: int = 0
    #: Why the request gets no further prefill leg.
    alone: str = ""
    #: Prefill engines that the client has named; None: any.
    named: Sequence[KnownEngine] | None = None


@dataclass(slots=True, kw_only=True)
class EnginePlacement:
    """The engines of one attempt."""

    number: int
    #: None: the decode engine computes the prompt.
    prefill: KnownEngine | None
    decode: KnownEngine
    #: Why there is no prefill leg.
    alone: str
    choices: list[LegChoice] = field(default_factory=list[LegChoice])
    chain: Sequence[ChainHash]
    prompt_tokens: int


class Placer:
    """Chooses engines by what they hold of the prompt, and by load. Equal ones take turns.

    A placed leg is load of its engine until `released`; its owner calls that in any case.
    """

    def __init__(self, engines: KnownEngines, config: ForwarderConfig):
        self.choices: Counter[tuple[str, str]] = Counter()
        self._engines, self._protocol = engines, engines.protocol
        self._limit = config.max_local_prefill_length
        self._numbers = itertools.count()

    def place(self, request: ClientRequest, tried: Tried) -> EnginePlacement:
        """Raises NoEngine."""
        # Where the client chooses, it does not matter what engines hold.
        chain = text_chain(request.prompt) if tried.named is None else []
        matched, tokens = self._held(chain), tokens_of(request.prompt)
        alone = tried.alone or self._alone(request, tried)
        prefilling = [] if alone else self._prefilling(tried)
        if not prefilling:
            alone = alone or "no_prefill_worker"
        # A request that is passed on unchanged may go to every engine.
        computes = bool(alone and request.route and alone != "no_header")
        decoding = self._decoding(tried.decode, computes=computes)
        decode, choice = self._choose("decode", decoding, matched, alone)
        prefilling = [engine for engine in prefilling if engine is not decode]
        if not alone and decode.decodes_alone:
            if not prefilling:
                alone = "no_prefill_worker"
            elif self._limit and tokens - matched[decode.number] <= self._limit:
                # The decode workers' rule (`disagg/decision/rule.py`) without a queue: stock
                # engines do not say how long theirs is.
                alone = "short" if tokens <= self._limit else "cached"
        placement = EnginePlacement(
            number=next(self._numbers),
            prefill=None,
            decode=decode,
            alone=alone,
            chain=chain,
            prompt_tokens=tokens,
        )
        if not alone:
            placement.prefill, first = self._choose("prefill", prefilling, matched)
            self._book(placement, placement.prefill, first)
        # A staged decode leg is placed later; only then the choice counts.
        if alone or not self._protocol.staged:
            self._book(placement, decode, choice)
        return placement

    def place_decode(self, placement: EnginePlacement, tried: Tried) -> None:
        """After the prefill leg. Raises NoEngine."""
        assert placement.prefill is not None
        self.released(placement, "decode")
        placement.choices[:] = [one for one in placement.choices if one.leg == "prefill"]
        decoding = self._decoding(tried.decode | {placement.prefill.number})
        held = self._held(placement.chain)
        placement.decode, choice = self._choose("decode", decoding, held)
        self._book(placement, placement.decode, choice)

    def computed(self, placement: EnginePlacement, leg: str) -> None:
        """The leg's engine holds the prompt now."""
        self._engines.loads.answered(f"{leg} {placement.number}")

    def released(self, placement: EnginePlacement, leg: str) -> None:
        """The leg has ended."""
        self._engines.loads.released(f"{leg} {placement.number}")

    def _held(self, chain: Sequence[ChainHash]) -> Counter[int]:
        """How many tokens of the prompt each engine is assumed to hold, by number."""
        found = self._engines.prompts.match(chain)
        return Counter({number: blocks * BLOCK_TOKENS for number, blocks in found.items()})

    def _prefilling(self, tried: Tried) -> list[KnownEngine]:
        """Of several that the client has named, the first."""
        among = self._engines.all if tried.named is None else tried.named
        able = [e for e in among if e.can_prefill and e.number not in tried.prefill]
        return able if tried.named is None else able[:1]

    def _alone(self, request: ClientRequest, tried: Tried) -> str:
        """Raises NoEngine."""
        if tried.named is not None and not tried.named:
            return "no_header"
        reason, engines = request.alone, self._engines.all
        if request.route not in self._protocol.routes:
            reason = "route"
        elif request.batch and not self._protocol.batches:
            reason = request.batch
        if reason and request.route and engines and not any(e.decodes_alone for e in engines):
            raise NoEngine(
                f"{request.route} with {reason} needs an engine that prefills and decodes; with"
                f" {self._protocol.name} none of these engines does",
                ever=False,
            )
        return reason

    def _decoding(self, without: Set[int], *, computes: bool = False) -> list[KnownEngine]:
        """At least one. computes: they must be able to compute a prompt. Raises NoEngine."""
        decoding = [e for e in self._engines.all if e.decodes and e.usable]
        able = [
            e for e in decoding if e.number not in without and (e.decodes_alone or not computes)
        ]
        if not decoding:
            raise NoEngine("no decode engine is healthy")
        if not able and computes:
            raise NoEngine("no healthy engine can answer this request without a prefill engine")
        if not able:
            raise NoEngine("no other decode engine is healthy")
        return able

    def _choose(
        self, leg: str, able: Sequence[KnownEngine], matched: Counter[int], alone: str = ""
    ) -> tuple[KnownEngine, LegChoice]:
        """What a decode engine holds counts where it computes the prompt, or may: else the KV comes
        from the prefill engine."""
        counts, loads = leg == "prefill" or alone or self._limit, self._engines.loads
        engines = {engine.number: engine for engine in able}
        number, reason = loads.choose(
            list(engines), matched if counts else {}, _KV_WEIGHT, kind=leg
        )
        report = self._engines.load(number)
        return engines[number], LegChoice(
            leg=leg,
            engine=engines[number].name,
            reason=reason,
            of=len(able),
            matched_tokens=matched[number],
            load_tokens=loads.of(number),
            kv_usage=report.kv_usage if report is not None else 0.0,
        )

    def _book(self, placement: EnginePlacement, engine: KnownEngine, choice: LegChoice) -> None:
        """The engine has its turn, and the leg's load."""
        leg, held, tokens = choice.leg, choice.matched_tokens, placement.prompt_tokens
        placement.choices.append(choice)
        self.choices[leg, choice.reason] += 1
        computes = leg == "prefill" or placement.alone
        # The sent prompts are known in pieces of an assumed length, so the sum may exceed the
        # prompt.
        uncached = max(0, tokens - held) if computes else 0
        new = placement.chain[held // BLOCK_TOKENS :]
        request = OwnRequest(engine.number, new, tokens, uncached, kind=leg)
        self._engines.loads.book(f"{leg} {placement.number}", request)
