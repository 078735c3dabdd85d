"""The KV memory of an engine's sequences: cached blocks of prompts, and tokens of their own."""

from dynamo_lite.capacity.kv_pool import KvPool
from dynamo_lite.capacity.sequence import Sequence
from dynamo_lite.policy.routing.kv_chain import ChainHash


class SequenceMemory:
    """Writes `blocks`, `own` and the cached part of `computed` of each sequence."""

    def __init__(self, pool: KvPool, block_tokens: int):
        self._pool, self._block = pool, block_tokens

    def fits(self, sequence: Sequence) -> bool:
        if not sequence.request.hashes:
            return sequence.context <= self._pool.free
        blocks = self._cached(sequence)
        return self._pool.fits(blocks, sequence.context - len(blocks) * self._block)

    def take(self, sequence: Sequence) -> int:
        """Takes memory for what needs KV. Returns the number of cached tokens."""
        sequence.blocks = self._cached(sequence)
        cached = sequence.computed = len(sequence.blocks) * self._block
        sequence.own = sequence.context - cached
        self._pool.use(sequence.blocks, sequence.own)
        return cached

    def keep_blocks(self, sequence: Sequence) -> None:
        """The prompt's full blocks enter the prefix cache."""
        if hashes := sequence.request.hashes:
            fresh = self._pool.store(hashes[len(sequence.blocks) :])
            sequence.blocks += fresh
            sequence.own -= len(fresh) * self._block

    def release(self, sequence: Sequence) -> None:
        self._pool.release(sequence.blocks, sequence.own)
        sequence.blocks, sequence.own = [], 0

    def _cached(self, sequence: Sequence) -> list[ChainHash]:
        """The cached blocks that it can use: at least one token has to be computed."""
        hashes = sequence.request.hashes
        if not hashes:
            return []
        most = (sequence.context - 1) // self._block
        return list(hashes[: min(self._pool.cached_blocks(hashes), most)])
