"""Which engines hold which prefixes, by their own KV events."""

from array import array
from collections import Counter
from collections.abc import Sequence

from dynamo_lite.forward.choosing import MAX_INDEX_BLOCKS
from dynamo_lite.protocol.kv import KvChange, KvCleared, KvRemoved, KvStored
from dynamo_lite.routing.kv_chain import ChainHash, chain_hashes
from dynamo_lite.routing.kv_index import KvIndex


class PromptTokens:
    """token_ids: 0 to 2^32 - 1, else OverflowError or TypeError. cache_salt: of the request."""

    __slots__ = ("_chains", "_ids", "_salt")

    def __init__(self, token_ids: Sequence[int], cache_salt: str | None = None):
        self._ids = array("I", token_ids)
        self._salt = cache_salt
        self._chains: dict[int, list[ChainHash]] = {}

    def __len__(self) -> int:
        return len(self._ids)

    def chain(self, block_size: int) -> list[ChainHash]:
        """The hashes of its full blocks; computed once for each size."""
        found = self._chains.get(block_size)
        if found is None:
            found = chain_hashes(self._ids, block_size, cache_salt=self._salt)
            self._chains[block_size] = found
        return found


class KnownBlocks:
    """Engines are known by their numbers."""

    def __init__(self) -> None:
        #: Number of batches by result; see `KvSubscription`.
        self.batches: Counter[str] = Counter()
        self._indexes: dict[int, KvIndex] = {}
        #: Block size of each engine whose events are being followed without a gap; 0: not known.
        self._sizes: dict[int, int] = {}

    def __len__(self) -> int:
        """Different blocks."""
        return sum(map(len, self._indexes.values()))

    @property
    def following(self) -> int:
        """Number of engines whose events are followed without a gap."""
        return len(self._sizes)

    def follow(self, engine: int) -> None:
        """The engine holds nothing now, and all its changes are reported from now on."""
        self.forget(engine)
        self._sizes[engine] = 0

    def forget(self, engine: int) -> None:
        """The blocks of the engine are not known any more."""
        self._sizes.pop(engine, None)
        for index in self._indexes.values():
            index.leave(engine)

    def changed(self, engine: int, block_size: int, changes: Sequence[KvChange]) -> None:
        """block_size: of the engine's blocks, in tokens."""
        if engine not in self._sizes:
            return
        if self._sizes[engine] != block_size:
            self.follow(engine)
            self._sizes[engine] = block_size
        index = self._indexes.get(block_size)
        if index is None:
            index = self._indexes[block_size] = KvIndex(MAX_INDEX_BLOCKS)
        for change in changes:
            match change:
                case KvStored():
                    index.stored(engine, change.hashes)
                case KvRemoved():
                    index.removed(engine, change.hashes, change.cut)
                case KvCleared():
                    index.leave(engine)

    def matched(self, tokens: PromptTokens) -> dict[int, int]:
        """How many tokens of the prompt each engine holds whose events are followed; 0 too."""
        found = dict.fromkeys(self._sizes, 0)
        for block_size, index in self._indexes.items():
            for engine, blocks in index.match(tokens.chain(block_size)).items():
                if self._sizes.get(engine) == block_size:
                    found[engine] = blocks * block_size
        return found
