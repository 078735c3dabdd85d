"""Names of KV blocks that workers and routers compute alike, whatever engine holds the blocks.

A block's hash is XXH3 (64 bits) of its tokens, with its parent's hash as the seed, so it stands for
the whole prefix up to its end. The first one's parent is made of the cache salt and the name of the
LoRA adapter: prompts that must not share KV share no hash. Hashes only choose workers: a collision
costs a cache hit, never a wrong token.
"""

from array import array
from collections.abc import Sequence
from typing import TypeAlias

from xxhash import xxh3_64_intdigest

ChainHash: TypeAlias = int

#: 56 bits: among a million blocks there is a collision in one of 10^5 sets, and such an integer
#: takes Python 32 bytes, a longer one 48.
MAX_HASH = (1 << 56) - 1


def root_hash(cache_salt: str | None = None, adapter: str | None = None) -> ChainHash:
    """The parent of the first block. adapter: the LoRA adapter's key."""
    above = xxh3_64_intdigest(adapter.encode()) if adapter else 0
    return xxh3_64_intdigest((cache_salt or "").encode(), above) & MAX_HASH


def chain_hashes(
    token_ids: Sequence[int],
    block_size: int,
    *,
    cache_salt: str | None = None,
    adapter: str | None = None,
) -> list[ChainHash]:
    """The hashes of all full blocks, in order. Token ids are 0 to 2^32 - 1."""
    return extend(root_hash(cache_salt, adapter), token_ids, block_size)


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
