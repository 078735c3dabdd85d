"""Which engine takes a leg of a forwarded request, and whether it needs a prefill leg at all.

It is the score of the KV-aware router (`routing/kv_routing.py`). What differs is what is known: an
engine is assumed to hold the prompts that this process sent to it. Prompts are text here, not
tokens, so amounts are estimates.
"""

from collections.abc import Sequence

from msgspec import structs
from xxhash import xxh3_64_intdigest

from dynamo_lite.protocol.forwarding import LegCandidate, LegChoice
from dynamo_lite.protocol.options import KvRoutingOptions
from dynamo_lite.routing.kv_chain import MAX_HASH, ChainHash
from dynamo_lite.routing.kv_index import KvIndex
from dynamo_lite.routing.worker_loads import MAX_KV_USAGE

#: Bytes per token: about the average of English text and source code.
BYTES_PER_TOKEN = 4
#: Bytes of a prompt's JSON per block; about 64 tokens.
BLOCK_BYTES = 256
#: Candidates of a choice that `explain` shows.
_SHOWN = 8
#: Most different blocks that are remembered.
MAX_INDEX_BLOCKS = 500_000
_KV_WEIGHT = KvRoutingOptions().kv_weight


def text_chain(prompt: bytes) -> list[ChainHash]:
    """The hashes of all full blocks of a prompt, each of which stands for the prefix up to it."""
    previous, made = 0, list[ChainHash]()
    for start in range(0, len(prompt) - BLOCK_BYTES + 1, BLOCK_BYTES):
        previous = xxh3_64_intdigest(prompt[start : start + BLOCK_BYTES], previous) & MAX_HASH
        made.append(previous)
    return made


def tokens_of(prompt: bytes) -> int:
    """Estimates the number of tokens of a prompt."""
    return -(-len(prompt) // BYTES_PER_TOKEN)


class EngineChooser:
    """Chooses engines by what they hold of the prompt, and by load. Equal ones take turns."""

    def __init__(self) -> None:
        self._turn = 0
        #: By leg and engine.
        self._turns: dict[tuple[str, str], int] = {}

    def choose(self, leg: str, able: Sequence[LegCandidate], *, by_prefix: bool) -> LegChoice:
        """able: at least one. by_prefix: whether what they hold counts, beside load."""
        roomy = [one for one in able if one.kv_usage < MAX_KV_USAGE] or able
        weight = _KV_WEIGHT if by_prefix else 0.0
        scores = {one.engine: weight * one.matched_tokens - one.load_tokens for one in roomy}
        chosen = min(
            roomy, key=lambda one: (-scores[one.engine], self._turns.get((leg, one.engine), 0))
        )
        shown = [chosen, *(one for one in able[: _SHOWN + 1] if one is not chosen)][:_SHOWN]
        return LegChoice(
            leg=leg,
            engine=chosen.engine,
            reason=_why(chosen, able, by_prefix),
            candidates=[structs.replace(one, score=scores.get(one.engine)) for one in shown],
            of=len(able),
        )

    def took(self, choice: LegChoice) -> None:
        """The engine has its turn."""
        if choice.of == 1:
            return
        self._turn += 1
        self._turns[choice.leg, choice.engine] = self._turn

    def forget(self, engine: str) -> None:
        """The engine has left."""
        self._turns = {key: turn for key, turn in self._turns.items() if key[1] != engine}


def _why(chosen: LegCandidate, able: Sequence[LegCandidate], by_prefix: bool) -> str:
    if len(able) == 1:
        return "only"
    longest = max(one.matched_tokens for one in able)
    if not longest or not by_prefix:
        return "load"
    return "prefix" if chosen.matched_tokens == longest else "balance"


class SentPrompts:
    """Which prompts were sent to which engines."""

    def __init__(self) -> None:
        self._index = KvIndex(BLOCK_BYTES, MAX_INDEX_BLOCKS)

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
