"""Which engines take one attempt of a request.

The score is that of the KV-aware router (`routing/kv_routing.py`). What differs is what is known:
an engine is assumed to hold the prompts that this process sent to it.
"""

import itertools
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from dynamo_lite.forward.bodies import ClientRequest
from dynamo_lite.forward.engines import KnownEngine
from dynamo_lite.forward.health import KnownEngines
from dynamo_lite.forward.options import ForwarderConfig
from dynamo_lite.forward.prompts import BLOCK_BYTES, BYTES_PER_TOKEN, text_chain, tokens_of
from dynamo_lite.protocol.errors import NoWorkers
from dynamo_lite.protocol.forwarding import LegChoice
from dynamo_lite.protocol.options import KvRoutingOptions
from dynamo_lite.routing.kv_chain import ChainHash
from dynamo_lite.routing.worker_loads import MAX_KV_USAGE

_KV_WEIGHT = KvRoutingOptions().kv_weight


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
    """Chooses engines by what they hold of the prompt, and by load. Equal ones take turns."""

    def __init__(self, engines: KnownEngines, config: ForwarderConfig):
        self.choices: Counter[tuple[str, str]] = Counter()
        self._engines, self._protocol = engines, engines.protocol
        self._limit = config.max_local_prefill_length
        self._turns = itertools.count(1)

    def place(self, request: ClientRequest, tried: Tried) -> EnginePlacement:
        """Raises NoWorkers, CannotServe."""
        # Where the client chooses, it does not matter what engines hold.
        chain = text_chain(request.prompt) if tried.named is None else []
        matched, tokens = self._held(chain), tokens_of(request.prompt)
        alone = tried.alone or self._alone(request, tried)
        prefilling = [] if alone else self._prefilling(tried)
        if not prefilling:
            alone = alone or "no_prefill_worker"
        # A request that is passed on unchanged may go to every engine.
        computes = bool(alone and request.route and alone != "no_header")
        decode, choice = self._choose_decode(tried.decode, matched, alone, computes=computes)
        prefilling = [engine for engine in prefilling if engine is not decode]
        if not alone and decode.decodes_alone:
            if not prefilling:
                alone = "no_prefill_worker"
            elif self._limit and tokens - matched[decode.number] <= self._limit:
                # The decode workers' rule (`disagg/decision/rule.py`) without a queue: stock
                # engines do not say how long theirs is.
                alone = "short" if tokens <= self._limit else "cached"
        prefill, legs = None, [(decode, choice)]
        if not alone:
            prefill, first = self._choose("prefill", prefilling, matched)
            # A staged decode leg is placed later; only then the choice counts.
            legs = [(prefill, first), *(() if self._protocol.staged else legs)]
        for engine, one in legs:
            self._took(engine, one)
        return EnginePlacement(
            prefill=prefill,
            decode=decode,
            alone=alone,
            choices=[one for _, one in legs],
            chain=chain,
            prompt_tokens=tokens,
            # The sent prompts are known in pieces of an assumed length, so the sum may exceed the
            # prompt.
            uncached_tokens=max(0, tokens - (matched[prefill.number] if prefill else 0)),
        )

    def place_decode(self, placement: EnginePlacement, tried: Tried) -> KnownEngine:
        """After the prefill leg. Raises NoWorkers."""
        without = tried.decode
        if placement.prefill is not None:
            without = without | {placement.prefill.number}
        engine, choice = self._choose_decode(without, self._held(placement.chain), "")
        placement.choices[:] = [one for one in placement.choices if one.leg == "prefill"] + [choice]
        self._took(engine, choice)
        return engine

    def sent(self, engine: KnownEngine, placement: EnginePlacement) -> None:
        """The engine holds the prompt now."""
        if placement.chain and not engine.left:
            self._engines.index.stored(engine.number, placement.chain)

    def _held(self, chain: Sequence[ChainHash]) -> Counter[int]:
        """How many tokens of the prompt each engine is assumed to hold, by number."""
        found = self._engines.index.match(chain)
        return Counter({e: blocks * BLOCK_BYTES // BYTES_PER_TOKEN for e, blocks in found.items()})

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
        matched: Counter[int],
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
        matched: Counter[int],
        *,
        by_prefix: bool = True,
    ) -> tuple[KnownEngine, LegChoice]:
        """able: at least one. by_prefix: whether what they hold counts, beside load."""
        roomy = [one for one in able if one.kv_usage < MAX_KV_USAGE] or able
        weight = _KV_WEIGHT if by_prefix else 0.0
        chosen = min(
            roomy,
            key=lambda one: (
                one.load_tokens - weight * matched[one.number],
                one.turns.get(leg, 0),
            ),
        )
        longest = max(matched[one.number] for one in able)
        if len(able) == 1:
            reason = "only"
        elif not longest or not by_prefix:
            reason = "load"
        else:
            reason = "prefix" if matched[chosen.number] == longest else "balance"
        return chosen, LegChoice(
            leg=leg,
            engine=chosen.name,
            reason=reason,
            of=len(able),
            matched_tokens=matched[chosen.number],
            load_tokens=chosen.load_tokens,
            kv_usage=chosen.kv_usage,
        )

    def _took(self, engine: KnownEngine, choice: LegChoice) -> None:
        """The engine has its turn."""
        self.choices[choice.leg, choice.reason] += 1
        engine.turns[choice.leg] = next(self._turns)
