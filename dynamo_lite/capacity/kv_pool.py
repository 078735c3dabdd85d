"""The KV memory of one engine, counted in tokens, with a prefix cache.

A block of a prompt is known by its hash. Blocks that sequences use stay; others are evicted, the
longest unused first, when memory is needed.
"""

from collections.abc import Callable, Sequence

from dynamo_lite.policy.routing.kv_chain import ChainHash


def _ignore(_: list[ChainHash]) -> None:
    pass


class KvPool:
    """on_stored, on_removed: called with the hashes of blocks that come and go."""

    def __init__(
        self,
        tokens: int,
        block_tokens: int,
        *,
        on_stored: Callable[[list[ChainHash]], None] = _ignore,
        on_removed: Callable[[list[ChainHash]], None] = _ignore,
    ):
        self.tokens, self._block = tokens, block_tokens
        self._on_stored, self._on_removed = on_stored, on_removed
        #: Tokens that sequences use, shared blocks once.
        self.used = 0
        self._users: dict[ChainHash, int] = {}
        #: Blocks without a user, the longest unused first.
        self._idle: dict[ChainHash, None] = {}

    @property
    def free(self) -> int:
        """Tokens that can be taken; cached ones without a user are evicted then."""
        return self.tokens - self.used

    @property
    def usage(self) -> float:
        return self.used / self.tokens

    def cached_blocks(self, hashes: Sequence[ChainHash]) -> int:
        """How many of the first blocks are here."""
        users, idle, count = self._users, self._idle, 0
        for key in hashes:
            if key not in users and key not in idle:
                break
            count += 1
        return count

    def fits(self, hashes: Sequence[ChainHash], tokens: int) -> bool:
        """Whether these cached blocks and `tokens` more can be used."""
        idle = sum(1 for key in hashes if key in self._idle)
        return self.used + idle * self._block + tokens <= self.tokens

    def use(self, hashes: Sequence[ChainHash], tokens: int) -> None:
        """Takes cached blocks, and `tokens` of new memory."""
        for key in hashes:
            if key in self._idle:
                del self._idle[key]
                self._users[key] = 1
                self.used += self._block
            else:
                self._users[key] += 1
        self.grow(tokens)

    def grow(self, tokens: int) -> None:
        """Takes `tokens` of new memory."""
        self.used += tokens
        self._evict()

    def store(self, hashes: Sequence[ChainHash]) -> list[ChainHash]:
        """New blocks of a sequence are computed. Returns those that were not here: they are cached
        from now on, in the sequence's memory. Of the others the sequence keeps its own copies."""
        fresh = [key for key in hashes if key not in self._users and key not in self._idle]
        self._users.update(dict.fromkeys(fresh, 1))
        if fresh:
            self._on_stored(fresh)
        return fresh

    def release(self, hashes: Sequence[ChainHash], tokens: int) -> None:
        """A sequence ends: it used these blocks, and `tokens` of its own."""
        self.used -= tokens
        for key in reversed(hashes):  # ends of prompts are evicted first
            left = self._users[key] - 1
            if left:
                self._users[key] = left
            else:
                del self._users[key]
                self._idle[key] = None
                self.used -= self._block
        self._evict()

    def _evict(self) -> None:
        excess = len(self._idle) * self._block - (self.tokens - self.used)
        if excess <= 0 or not self._idle:
            return
        gone: list[ChainHash] = []
        while excess > 0 and self._idle:
            key = next(iter(self._idle))
            del self._idle[key]
            gone.append(key)
            excess -= self._block
        self._on_removed(gone)
