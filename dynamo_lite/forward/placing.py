"""Which engines take one attempt of a request."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dynamo_lite.forward.bodies import ClientRequest
from dynamo_lite.forward.engines import KnownEngine, KnownEngines, view
from dynamo_lite.forward.failures import PrefillFailed
from dynamo_lite.forward.options import ForwarderConfig
from dynamo_lite.forward.protocols.base import ForwardProtocol, LegOrder
from dynamo_lite.policy.decision.disagg import Local
from dynamo_lite.policy.routing.forwarding import (
    EngineChoice,
    EngineChooser,
    SentPrompts,
    needs_prefill,
    text_chain,
    tokens_of,
)
from dynamo_lite.policy.routing.known_blocks import KnownBlocks
from dynamo_lite.policy.routing.kv_chain import ChainHash
from dynamo_lite.policy.routing.prompt_tokens import PromptTokens
from dynamo_lite.protocol.errors import NoWorkers

logger = logging.getLogger(__name__)

#: Why a request has no prefill leg.
ALONE_REASONS = (
    *("route", "n", "prompts", "echo", "prompt_logprobs", "beam_search", "prompt_embeds"),
    *("stored_response", "short", "cached", "no_prefill_worker", "prefill_failed", "no_handoff"),
    *("no_header", "misfit"),
)


class CannotServe(Exception):
    """None of the configured engines could ever answer this request."""


@dataclass(frozen=True, slots=True)
class ChosenEngine:
    """A choice. It names the engines, because they may leave."""

    leg: str
    engine: str
    choice: EngineChoice
    #: Names of the engines of the choice's views.
    names: tuple[str, ...]


@dataclass(slots=True, kw_only=True)
class Tried:
    """The engines and choices that a request has tried so far; the workflow fills it in."""

    prefill: set[int] = field(default_factory=set[int])
    decode: set[int] = field(default_factory=set[int])
    #: Why the request gets no further prefill leg.
    alone: str = ""
    #: All choices so far, of all attempts.
    choices: list[ChosenEngine] = field(default_factory=list[ChosenEngine])


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlacement:
    """The engines of one attempt."""

    #: None: the decode engine computes the prompt.
    prefill: KnownEngine | None
    #: None: chosen after the prefill leg.
    decode: KnownEngine | None
    #: Why there is no prefill leg.
    alone: str
    chain: Sequence[ChainHash]
    #: None: estimated, from the text.
    tokens: PromptTokens | None = None
    prompt_tokens: int
    #: Tokens of the prompt that are not assumed to be in the prefill engine's cache.
    uncached_tokens: int


class Places(Protocol):
    """The interface that the workflow calls for each attempt."""

    #: Choices by leg and reason.
    choices: Counter[tuple[str, str]]

    def place(self, request: ClientRequest, tried: Tried) -> EnginePlacement:
        """Raises NoWorkers, CannotServe."""
        ...

    def place_decode(self, placement: EnginePlacement, tried: Tried) -> KnownEngine:
        """After the prefill leg. Raises NoWorkers."""
        ...

    def sent(self, engine: KnownEngine, placement: EnginePlacement) -> None:
        """The engine has computed, or received, the prompt."""
        ...

    def prefill_failed(self, failure: PrefillFailed) -> None:
        """A prefill leg has failed."""
        ...


def why_alone(request: ClientRequest, protocol: ForwardProtocol) -> str:
    """Why it gets no prefill leg, whatever the engines; empty if it may get one."""
    if request.route not in protocol.routes:
        return "route"
    if request.batch and not protocol.batches:
        return request.batch
    return request.alone


class Placer:
    """Chooses engines and remembers which prompts they were sent.

    uniform: returns numbers in [0, 1). known: the blocks of engines that publish them; for other
    engines they are assumed.
    """

    def __init__(
        self,
        engines: KnownEngines,
        protocol: ForwardProtocol,
        config: ForwarderConfig,
        sent: SentPrompts,
        *,
        uniform: Callable[[], float],
        known: KnownBlocks | None = None,
    ):
        #: Choices by leg and reason.
        self.choices: Counter[tuple[str, str]] = Counter()
        self._engines, self._protocol, self._config, self._sent = engines, protocol, config, sent
        self._known = known
        self._prefill = EngineChooser(config.prefill_choice, config.routing, uniform=uniform)
        self._decode = EngineChooser(config.decode_choice, config.routing, uniform=uniform)
        self._compares = "prefix" in (config.prefill_choice, config.decode_choice) or bool(
            config.max_local_prefill_length
        )
        self._staged = (
            config.choose_decode == "staged"
            and protocol.order is LegOrder.SERIAL
            and not protocol.names_decode
        )

    def place(self, request: ClientRequest, tried: Tried) -> EnginePlacement:
        """Raises NoWorkers, CannotServe."""
        chain = text_chain(request.prompt) if self._compares else []
        matched = self._matched(chain, request.tokens)
        tokens = len(request.tokens or ()) or tokens_of(request.prompt)
        alone = tried.alone or self._alone(request)
        prefilling = [] if alone else self._engines.prefilling(tried.prefill)
        if not alone and not prefilling:
            alone = "no_prefill_worker"
        decode = None
        if alone or not self._staged:
            # A request that is passed on unchanged may go to every engine.
            decode = self._choose_decode(
                tried, matched, tokens, alone=bool(alone and request.route)
            )
            prefilling = [engine for engine in prefilling if engine is not decode]
            alone = alone or self._not_worth_it(decode, len(prefilling), matched, tokens)
            if alone and request.route and not decode.decodes_alone:
                decode = self._choose_decode(tried, matched, tokens, alone=True)
        prefill = (
            None
            if alone
            else self._choose(self._prefill, "prefill", prefilling, matched, tokens, tried)
        )
        return EnginePlacement(
            prefill=prefill,
            decode=decode,
            alone=alone,
            chain=chain,
            tokens=request.tokens,
            prompt_tokens=tokens,
            # The sent prompts are known in pieces of an assumed length, so the sum may exceed the
            # prompt.
            uncached_tokens=max(0, tokens - (matched.get(prefill.number, 0) if prefill else 0)),
        )

    def place_decode(self, placement: EnginePlacement, tried: Tried) -> KnownEngine:
        """For staged protocols, after the prefill leg. Raises NoWorkers."""
        without = Tried(prefill=tried.prefill, decode=set(tried.decode), choices=tried.choices)
        if placement.prefill is not None:
            without.decode.add(placement.prefill.number)
        matched = self._matched(placement.chain, placement.tokens)
        return self._choose_decode(without, matched, placement.prompt_tokens, alone=False)

    def prefill_failed(self, failure: PrefillFailed) -> None:
        """Does nothing: engines are checked."""

    def sent(self, engine: KnownEngine, placement: EnginePlacement) -> None:
        """The engine has computed, or received, the prompt."""
        if engine.left:
            return
        self._sent.sent(engine.number, placement.chain)

    def forget(self, engine: KnownEngine) -> None:
        """The engine has left."""
        self._sent.forget(engine.number)
        self._prefill.forget(engine.number)
        self._decode.forget(engine.number)

    def _matched(self, chain: Sequence[ChainHash], tokens: PromptTokens | None) -> dict[int, int]:
        """How many tokens of the prompt each engine holds, or is assumed to hold."""
        matched = self._sent.matched(chain)
        if self._known is not None and tokens is not None:
            matched |= self._known.matched(tokens)
        return matched

    def _alone(self, request: ClientRequest) -> str:
        """Raises CannotServe."""
        reason, engines = why_alone(request, self._protocol), self._engines.all
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
        verdict = needs_prefill(
            prompt_tokens=tokens,
            cached_tokens=matched.get(decode.number, 0),
            prefill_engines=prefilling,
            max_local_prefill_length=self._config.max_local_prefill_length,
        )
        return verdict.reason.value if isinstance(verdict, Local) else ""

    def _choose_decode(
        self, tried: Tried, matched: Mapping[int, int], tokens: int, *, alone: bool
    ) -> KnownEngine:
        able = self._engines.decoding(tried.decode, alone=alone)
        if not able:
            raise NoWorkers(self._missing(tried, alone=alone))
        return self._choose(self._decode, "decode", able, matched, tokens, tried)

    def _choose(
        self,
        chooser: EngineChooser,
        leg: str,
        able: Sequence[KnownEngine],
        matched: Mapping[int, int],
        tokens: int,
        tried: Tried,
    ) -> KnownEngine:
        choice = chooser.choose(
            [view(engine, matched.get(engine.number, 0)) for engine in able], tokens
        )
        assert isinstance(choice, EngineChoice)
        self.choices[leg, choice.reason] += 1
        engine = self._engines[choice.view.engine]
        names = tuple(one.name for one in able)
        tried.choices.append(ChosenEngine(leg, engine.name, choice, names))
        logger.debug(
            "%s: %s, %s: it holds about %d of %d tokens, and %d tokens are queued there;"
            " %d candidates",
            leg,
            engine.name,
            choice.reason,
            choice.view.matched,
            tokens,
            choice.view.load,
            len(able),
        )
        return engine

    def _missing(self, tried: Tried, *, alone: bool) -> str:
        """The text contains no addresses, because a client reads it."""
        if not any(engine.usable for engine in self._engines.all if engine.decodes):
            return "no decode engine is healthy"
        if tried.decode:
            return "no other decode engine is healthy"
        if alone:
            return "no healthy engine can answer this request without a prefill engine"
        return "no decode engine is left"
