"""Which engines take the legs of a forwarded request, and whether it needs a prefill leg at all.

Filter and score are those of the KV-aware router (`routing/kv_routing.py`). What differs is
what is known: stock engines do not say which blocks they hold, so an engine is assumed to hold the
prompts that were sent to it. Prompts are text here, not tokens, so amounts are estimates.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from msgspec import structs
from xxhash import xxh3_64_intdigest

from dynamo_lite.protocol.forwarding import LegCandidate, LegChoice
from dynamo_lite.protocol.options import KvRoutingOptions
from dynamo_lite.routing.kv_chain import MAX_HASH, ChainHash
from dynamo_lite.routing.kv_index import KvIndex
from dynamo_lite.routing.worker_loads import MAX_KV_USAGE

Strategy = Literal["round-robin", "random", "least-load", "prefix"]

#: Bytes per token: about the average of English text and source code.
BYTES_PER_TOKEN = 4
#: Bytes of a prompt's JSON per block; about 64 tokens.
BLOCK_BYTES = 256
#: Candidates of a choice that `explain` shows.
_SHOWN = 8
#: Most different blocks that are remembered.
MAX_INDEX_BLOCKS = 500_000


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


class EngineChooser:
    """Chooses engines for one kind of leg. below: takes a number n and returns one below n."""

    def __init__(
        self,
        leg: str,
        strategy: Strategy,
        options: KvRoutingOptions,
        *,
        below: Callable[[int], int],
    ):
        self._leg = leg
        self._strategy: Strategy = strategy
        # Without weight, the tokens that an engine holds do not count.
        self._options = options if strategy == "prefix" else replace(options, kv_weight=0.0)
        self._below = below
        self._turn = 0
        self._turns: dict[str, int] = {}

    def choose(self, able: Sequence[LegCandidate]) -> LegChoice:
        """able: at least one. Among equals the first one is taken."""
        scores: dict[str, float] = {}
        if len(able) == 1:
            chosen, reason = able[0], "only"
        elif self._strategy == "round-robin":
            chosen, reason = min(able, key=self._last_turn), "turn"
        elif self._strategy == "random":
            chosen, reason = able[self._below(len(able))], "random"
        else:
            scores = self._scores(able)
            fit = [one for one in able if one.engine in scores]
            chosen = min(fit, key=lambda one: (-scores[one.engine], self._last_turn(one)))
            reason = self._why(chosen, able)
        self._turn += 1
        self._turns[chosen.engine] = self._turn
        shown = [chosen, *(one for one in able[: _SHOWN + 1] if one is not chosen)][:_SHOWN]
        return LegChoice(
            leg=self._leg,
            engine=chosen.engine,
            reason=reason,
            candidates=[structs.replace(one, score=scores.get(one.engine)) for one in shown],
            of=len(able),
        )

    def forget(self, engine: str) -> None:
        """The engine has left."""
        self._turns.pop(engine, None)

    def _scores(self, able: Sequence[LegCandidate]) -> dict[str, float]:
        """Of those that have room, if any has; larger is better."""
        options = self._options
        return {
            one.engine: options.kv_weight * one.matched_tokens - one.load_tokens
            for one in [one for one in able if one.kv_usage < MAX_KV_USAGE] or able
        }

    def _why(self, chosen: LegCandidate, able: Sequence[LegCandidate]) -> str:
        longest = max(one.matched_tokens for one in able)
        if not longest or not self._options.kv_weight:
            return "load"
        return "prefix" if chosen.matched_tokens == longest else "balance"

    def _last_turn(self, one: LegCandidate) -> int:
        return self._turns.get(one.engine, 0)


class SentPrompts:
    """Which prompts were sent to which engines."""

    def __init__(self) -> None:
        self._index = KvIndex(MAX_INDEX_BLOCKS)

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


def no_prefill_reason(
    *, prompt_tokens: int, cached_tokens: int, prefill_engines: int, max_local_prefill_length: int
) -> str:
    """Why the prompt gets no prefill leg; empty if it gets one. It is the decode workers' rule
    (`disagg/decision/rule.py`) without a queue: stock engines do not say how long theirs is.

    max_local_prefill_length: 0 sends every prompt to a prefill engine, however short.
    """
    if not prefill_engines:
        return "no_prefill_worker"
    limit = max_local_prefill_length
    if not limit or prompt_tokens - cached_tokens > limit:
        return ""
    return "short" if prompt_tokens <= limit else "cached"
