"""Names of KV blocks that workers and routers compute alike, whatever engine holds the blocks.

A block's hash is XXH3 (64 bits) of its tokens, with its parent's hash as the seed, so it stands for
the whole prefix up to its end. The first one's parent is made of the cache salt and the LoRA
adapter: prompts that must not share KV share no hash. Hashes only choose workers: a collision costs
a cache hit, never a wrong token.
"""

from array import array
from collections.abc import Hashable, Iterable, Sequence
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


class BlockHashes:
    """Which blocks one engine holds: the engine's names for them, and their hashes.

    An engine may hold a block twice, and reports it each time; the block is gone when it was
    removed as often.
    """

    def __init__(self) -> None:
        #: The hash, and how often it is held.
        self._known: dict[Hashable, tuple[ChainHash, int]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def held(self) -> list[ChainHash]:
        return [chain for chain, _ in self._known.values()]

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
        if parent is not None:
            if parent not in self._known:
                return []
            root = self._known[parent][0]
        chain = extend(root, token_ids, block_size)
        for name, made in zip(names, chain, strict=True):
            self._known[name] = made, self._known.get(name, (made, 0))[1] + 1
        return chain

    def removed(self, names: Iterable[Hashable]) -> list[ChainHash]:
        """Returns the blocks that are now gone. Unknown names are ignored."""
        gone: list[ChainHash] = []
        for name in names:
            chain, count = self._known.get(name, (0, 0))
            if count > 1:
                self._known[name] = chain, count - 1
            elif count:
                del self._known[name]
                gone.append(chain)
        return gone

    def clear(self) -> None:
        self._known.clear()
