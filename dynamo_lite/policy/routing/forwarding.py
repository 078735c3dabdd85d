"""Which engines take the legs of a forwarded request, and whether it needs a prefill leg at all.

Filter and score are those of the KV-aware router (`scoring.py`). What differs is what is
known: stock engines do not say which blocks they hold, so an engine is assumed to hold the prompts
that were sent to it. Prompts are text here, not tokens, so amounts are estimates.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from xxhash import xxh3_64_intdigest

from dynamo_lite.policy.decision.disagg import DecisionReason, Local, Remote, Verdict, decide
from dynamo_lite.policy.routing.kv_chain import MAX_HASH, ChainHash
from dynamo_lite.policy.routing.kv_index import KvIndex
from dynamo_lite.policy.routing.scoring import draw, score, with_room
from dynamo_lite.protocol.decisions import DecisionInputs, QueueSeen
from dynamo_lite.protocol.options import DecisionThresholds, KvRoutingOptions

Strategy = Literal["round-robin", "random", "least-load", "prefix"]

#: Bytes per token: about the average of English text and source code.
BYTES_PER_TOKEN = 4
#: Bytes of a prompt's JSON per block; about 64 tokens.
BLOCK_BYTES = 256


def text_chain(prompt: bytes, root: ChainHash = 0) -> list[ChainHash]:
    """The hashes of all full blocks of a prompt, each of which stands for the prefix up to it."""
    previous, made = root, list[ChainHash]()
    for start in range(0, len(prompt) - BLOCK_BYTES + 1, BLOCK_BYTES):
        previous = xxh3_64_intdigest(prompt[start : start + BLOCK_BYTES], previous) & MAX_HASH
        made.append(previous)
    return made


def tokens_of(prompt: bytes) -> int:
    """Estimates the number of tokens of a prompt."""
    return -(-len(prompt) // BYTES_PER_TOKEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineView:
    """One engine that may take a leg. Amounts are tokens."""

    engine: int
    #: Tokens of the prompt that are assumed to be in its prefix cache.
    matched: int = 0
    #: What it computes before this prompt, with `REQUEST_LOAD_TOKENS` for each request.
    load: int = 0
    kv_usage: float = 0.0
    #: A field of the router's candidates; unused here.
    credit: int = 0


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """An engine and why."""

    view: EngineView
    reason: str
    #: All engines that could be chosen.
    views: Sequence[EngineView] = ()
    #: Scores of the engines that were weighed; larger is better.
    scores: Mapping[int, float] = field(default_factory=dict[int, float])


class EngineChooser:
    """Chooses engines for one kind of leg. uniform: returns numbers in [0, 1)."""

    def __init__(
        self, strategy: Strategy, options: KvRoutingOptions, *, uniform: Callable[[], float]
    ):
        self._strategy: Strategy = strategy
        # Without weight, the tokens that an engine holds do not count.
        self._options = options if strategy == "prefix" else replace(options, kv_weight=0.0)
        self._uniform = uniform
        self._turn = 0
        self._turns: dict[int, int] = {}

    def choose(self, views: Sequence[EngineView], prompt_tokens: int) -> EngineChoice | None:
        """None without any view."""
        if not views:
            return None
        choice = self._choose(views, prompt_tokens)
        self._turn += 1
        self._turns[choice.view.engine] = self._turn
        return choice

    def forget(self, engine: int) -> None:
        """The engine has left."""
        self._turns.pop(engine, None)

    def _choose(self, views: Sequence[EngineView], prompt_tokens: int) -> EngineChoice:
        if len(views) == 1:
            return EngineChoice(views[0], "only", views)
        match self._strategy:
            case "round-robin":
                return EngineChoice(min(views, key=self._last_turn), "turn", views)
            case "random":
                return EngineChoice(views[int(self._uniform() * len(views))], "random", views)
            case _:
                return self._best(views, prompt_tokens)

    def _best(self, views: Sequence[EngineView], prompt_tokens: int) -> EngineChoice:
        options = self._options
        fit = with_room(views)
        scores = [score(view, options) for view in fit]
        by_engine = {view.engine: value for view, value in zip(fit, scores, strict=True)}
        best = min(range(len(fit)), key=lambda i: (-scores[i], self._last_turn(fit[i])))
        if options.temperature > 0:
            drawn = draw(scores, options.temperature * max(prompt_tokens, 1), self._uniform())
            if scores[drawn] < scores[best]:
                return EngineChoice(fit[drawn], "lot", views, by_engine)
            best = drawn
        chosen = fit[best]
        longest = max(view.matched for view in views)
        if not longest or not options.kv_weight:
            return EngineChoice(chosen, "load", views, by_engine)
        reason = "prefix" if chosen.matched == longest else "balance"
        return EngineChoice(chosen, reason, views, by_engine)

    def _last_turn(self, view: EngineView) -> tuple[int, int]:
        return self._turns.get(view.engine, 0), view.engine


class SentPrompts:
    """Which prompts were sent to which engines.

    max_blocks: most different blocks of `BLOCK_BYTES` that are remembered.
    """

    def __init__(self, max_blocks: int):
        self._index = KvIndex(max_blocks)

    def __len__(self) -> int:
        """Different blocks."""
        return len(self._index)

    def matched(self, chain: Sequence[ChainHash]) -> dict[int, int]:
        """How many tokens of the prompt each engine is assumed to hold."""
        found = self._index.match(chain)
        return {engine: blocks * BLOCK_BYTES // BYTES_PER_TOKEN for engine, blocks in found.items()}

    def sent(self, engine: int, chain: Sequence[ChainHash]) -> None:
        if chain:
            self._index.stored(engine, chain)

    def forget(self, engine: int) -> None:
        """The engine was restarted."""
        self._index.leave(engine)


def needs_prefill(
    *, prompt_tokens: int, cached_tokens: int, prefill_engines: int, max_local_prefill_length: int
) -> Verdict:
    """Whether the prompt gets a prefill leg. It is the rule of the decode workers (`disagg.py`)
    without a queue: stock engines do not say how long theirs is.

    max_local_prefill_length: 0 sends every prompt to a prefill engine, however short.
    """
    if max_local_prefill_length == 0 and prefill_engines:
        return Remote(DecisionReason.LONG)
    if not prefill_engines:
        return Local(DecisionReason.NO_PREFILL_WORKER)
    inputs = DecisionInputs(
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        queue=QueueSeen(jobs=0, prefill_workers=prefill_engines, age_s=0.0),
    )
    return decide(inputs, DecisionThresholds(max_local_prefill_length=max_local_prefill_length))
