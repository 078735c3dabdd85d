"""Names of KV blocks that workers and routers compute alike, whatever engine holds the blocks.

A block's hash is XXH3 (64 bits) of its tokens, with its parent's hash as the seed, so it stands for
the whole prefix up to its end. The first one's parent is made of the cache salt and the LoRA
adapter: prompts that must not share KV share no hash. Hashes only choose workers: a collision costs
a cache hit, never a wrong token.
"""

from array import array
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TypeAlias

from xxhash import xxh3_64_intdigest

ChainHash: TypeAlias = int

#: 56 bits: among a million blocks there is a collision in one of 10^5 sets, and such an integer
#: takes Python 32 bytes, a longer one 48.
HASH_BYTES = 7
MAX_HASH = (1 << (8 * HASH_BYTES)) - 1


def root_hash(cache_salt: str | None = None, lora_name: str | None = None) -> ChainHash:
    """The parent of the first block."""
    digest = blake2b(digest_size=HASH_BYTES, person=b"kv-root")
    for part in (cache_salt, lora_name):
        data = (part or "").encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return int.from_bytes(digest.digest(), "little")


_PLAIN = root_hash()


def chain_hashes(
    token_ids: Sequence[int], block_size: int, *, cache_salt: str | None = None
) -> list[ChainHash]:
    """The hashes of all full blocks, in order. Token ids are 0 to 2^32 - 1."""
    root = root_hash(cache_salt) if cache_salt else _PLAIN
    return extend(root, token_ids, block_size)


def extend(parent: ChainHash, token_ids: Sequence[int], block_size: int) -> list[ChainHash]:
    """The hashes of the full blocks that follow `parent`.

    Raises ValueError for a token id out of range.
    """
    count = len(token_ids) // block_size * block_size
    try:
        words = array("I", token_ids[:count])
    except (OverflowError, TypeError) as exc:
        raise ValueError(f"token ids: {exc}") from exc
    data = words.tobytes()  # in the byte order of the host: the same on all hosts of a graph
    previous, made = parent, list[ChainHash]()
    step = words.itemsize * block_size
    for start in range(0, len(data), step):
        previous = xxh3_64_intdigest(data[start : start + step], previous) & MAX_HASH
        made.append(previous)
    return made


@dataclass(eq=False, slots=True)
class _Block:
    """A block of one engine."""

    chain: ChainHash
    parent: Hashable
    #: How often it is held.
    count: int = 0
    #: Number of known blocks whose parent it is.
    behind: int = 0


class BlockHashes:
    """Which blocks one engine holds: the engine's names for them, and their hashes.

    An engine may hold a block twice, and reports it each time; the block is gone when it was
    removed as often. A block that is removed before its descendants leaves a cut.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, _Block] = {}

    def __len__(self) -> int:
        """Blocks and cuts."""
        return len(self._known)

    def held(self) -> list[ChainHash]:
        return [block.chain for block in self._known.values() if block.count]

    def cuts(self) -> list[ChainHash]:
        """Blocks that are not held, although some of their descendants are."""
        return [block.chain for block in self._known.values() if not block.count]

    def stored(
        self,
        names: Sequence[Hashable],
        parent: Hashable,
        token_ids: Sequence[int],
        block_size: int,
        root: ChainHash,
    ) -> list[ChainHash]:
        """Enters consecutive blocks, and returns the hashes of all of them.

        parent: the engine's name of the block before the first one; None if that is the prompt's
        first block, whose parent is `root`. With an unknown parent nothing is entered. Raises
        ValueError when tokens and blocks do not fit.
        """
        if block_size < 1 or len(token_ids) != len(names) * block_size:
            raise ValueError(f"{len(token_ids)} tokens in {len(names)} blocks of {block_size}")
        before = None if parent is None else self._known.get(parent)
        if parent is not None and before is None:
            return []
        chain = extend(root if before is None else before.chain, token_ids, block_size)
        for name, made in zip(names, chain, strict=True):
            block = self._known.get(name)
            if block is None:
                block = self._known[name] = _Block(made, parent)
                if before is not None:
                    before.behind += 1
            block.count += 1
            parent, before = name, block
        return chain

    def removed(self, names: Iterable[Hashable]) -> tuple[list[ChainHash], list[ChainHash]]:
        """Returns the blocks, or cuts, that are now gone, and the new cuts. Unknown names are
        ignored."""
        gone: list[ChainHash] = []
        cut: list[ChainHash] = []
        for name in names:
            block = self._known.get(name)
            if block is None or not block.count:
                continue
            block.count -= 1
            if block.count:
                continue
            if block.behind:
                cut.append(block.chain)
            else:
                gone += self._forget(name)
        return gone, cut

    def clear(self) -> None:
        self._known.clear()

    def _forget(self, name: Hashable) -> Iterator[ChainHash]:
        """Removes a block that is neither held nor a parent, and the cuts before it that are not
        parents any more."""
        while name is not None:
            block = self._known[name]
            if block.count or block.behind:
                return
            del self._known[name]
            yield block.chain
            name = block.parent
            if name is not None:
                self._known[name].behind -= 1
