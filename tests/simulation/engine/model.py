"""The model, and what an engine holds of it: memory, blocks, sequences.

The KV of position i is a digest of the tokens 0 to i, and the next token a
digest of the KV of the whole sequence, read out of the blocks. So the right
answer follows from the prompt alone, and any wrong byte changes it.
"""

import enum
import random
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from dynamo_lite.protocol.records import KvRegion

Words = npt.NDArray[np.uint64]

#: Token ids are below this.
VOCABULARY = 1 << 30
#: Low bits of a token that plain (unseeded) sampling leaves to chance.
_CHANCE = 0xFF

_MASK = (1 << 64) - 1
_START = 0x9E3779B97F4A7C15
#: Constants that make the KV of the layers differ.
_LAYER_SALTS = np.array([[0x0], [0xA5A5A5A5A5A5A5A5], [0x3C3C3C3C3C3C3C3C]], np.uint64)
LAYERS = len(_LAYER_SALTS)


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How a sequence is sampled; travels as `GenerateRequest.sampling`.

    temperature 0: greedy. Else seeded, or plain where seed is None: then a token's
    low bits are random.
    """

    max_tokens: int
    temperature: float = 0.0
    seed: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


decode_sampling = msgspec.msgpack.Decoder(Sampling).decode


def extend_states(states: list[int], tokens: Iterable[int]) -> None:
    """Appends one state (a digest of everything up to it) per token."""
    state = states[-1] if states else _START
    for token in tokens:
        state = ((state ^ (token + 1)) * 0xD6E8FEB86659FD93) & _MASK
        state ^= state >> 32
        states.append(state)


def kv_words(states: Sequence[int]) -> Words:
    """The KV of these positions: shape (LAYERS, len(states))."""
    return np.array(states, np.uint64)[None, :] ^ _LAYER_SALTS


class Sampler:
    """Draws one sequence's tokens. A seeded sequence starts at its first draw with every sampler,
    like an engine's generator with every request."""

    def __init__(self, sampling: Sampling, rng: random.Random):
        self._sampling, self._rng = sampling, rng
        self._draws = 0

    def draw(self, kv: Words) -> int:
        """The token after a sequence whose KV, as read from the blocks, is `kv`."""
        token = self.expected(kv)
        self._draws += 1
        if self._sampling.greedy or self._sampling.seed is not None:
            return token
        return token & ~_CHANCE | self._rng.randrange(_CHANCE + 1)

    def expected(self, kv: Words) -> int:
        digest = zlib.crc32(kv.tobytes())
        if self._sampling.seed is not None and not self._sampling.greedy:
            digest = zlib.crc32(f"{self._sampling.seed}/{self._draws}".encode(), digest)
        return digest % VOCABULARY


def first_wrong(prompt: Sequence[int], sampling: Sampling, tokens: Sequence[int]) -> int | None:
    """Index of the first token of an answer that the model would not have given."""
    states: list[int] = []
    extend_states(states, prompt)
    extend_states(states, tokens)
    kv = kv_words(states)
    sampler = Sampler(sampling, random.Random(0))
    exact = sampling.greedy or sampling.seed is not None
    for index, token in enumerate(tokens):
        off = sampler.draw(kv[:, : len(prompt) + index]) ^ token
        if off if exact else off & ~_CHANCE:
            return index
    return None


_WORD_BYTES = 8


class SimKvMemory:
    """LAYERS words per token, one for each layer.

    base: address of the first byte. dense: whether each layer's blocks lie back
    to back, or the layers of a block do.
    """

    def __init__(self, num_blocks: int, block_size: int, base: int, *, dense: bool):
        self.num_blocks, self.block_size, self.base, self._dense = (
            num_blocks,
            block_size,
            base,
            dense,
        )
        shape = (LAYERS, num_blocks, block_size) if dense else (num_blocks, LAYERS, block_size)
        self._words: Words = np.zeros(shape, np.uint64)
        #: (LAYERS, blocks, tokens), whatever the layout.
        self._by_layer = self._words if dense else self._words.transpose(1, 0, 2)
        self.raw: npt.NDArray[np.uint8] = self._words.reshape(-1).view(np.uint8)

    def covers(self, address: int, length: int) -> bool:
        start = address - self.base
        return start >= 0 and start + length <= self.raw.size

    def bytes_at(self, address: int, length: int) -> npt.NDArray[np.uint8]:
        return self.raw[address - self.base :][:length]

    @property
    def block_bytes(self) -> int:
        """Of one block of one layer."""
        return self.block_size * _WORD_BYTES

    def regions(self) -> tuple[KvRegion, ...]:
        size = self.block_bytes
        step = self.num_blocks * size if self._dense else size
        stride = size if self._dense else LAYERS * size
        return tuple(
            KvRegion(
                layer=str(index),
                base=self.base + index * step,
                stride_bytes=stride,
                block_bytes=size,
            )
            for index in range(LAYERS)
        )

    def block_at(self, offset: int) -> int:
        """Which block the byte `offset` belongs to."""
        block = offset // self.block_bytes
        return block % self.num_blocks if self._dense else block // LAYERS

    def fill(self, block_ids: Sequence[int], start: int, states: Sequence[int]) -> None:
        """Writes the KV of the positions from `start` on of a sequence in these blocks."""
        words = kv_words(states)
        at, end, size = start, start + len(states), self.block_size
        while at < end:
            upto = min(end, (at // size + 1) * size)
            block, first = block_ids[at // size], at % size
            self._by_layer[:, block, first : first + upto - at] = words[
                :, at - start : upto - start
            ]
            at = upto

    def ends_with(self, block: int, state: int) -> bool:
        """Whether the block's last token has this state."""
        return bool((self._by_layer[:, block, -1] == kv_words([state])[:, 0]).all())

    def read(self, block_ids: Sequence[int], count: int) -> Words:
        """The KV of a sequence's first `count` positions: shape (LAYERS, count)."""
        used = block_ids[: -(-count // self.block_size)]
        return self._by_layer[:, used].reshape(LAYERS, -1)[:, :count]


@dataclass(eq=False, slots=True)
class Block:
    """key: under which the prefix cache finds it; None when it holds no full prefix."""

    block_id: int
    ref_cnt: int = 0
    key: int | None = None

    @property
    def is_null(self) -> bool:
        return self.block_id == 0


class BlockPool:
    """Block 0 stands for nothing and is never given out.

    A block without references is free; it keeps its content, and may be found by
    its key, until it is given out again: oldest first.
    """

    def __init__(self, num_blocks: int):
        self.num_gpu_blocks = num_blocks
        self.blocks = [Block(i) for i in range(num_blocks)]
        self._free: OrderedDict[int, Block] = OrderedDict((b.block_id, b) for b in self.blocks[1:])
        self._cached: dict[int, Block] = {}

    def get_num_free_blocks(self) -> int:
        return len(self._free)

    def taken(self) -> list[int]:
        """Ids of the blocks with references."""
        return [b.block_id for b in self.blocks if b.ref_cnt]

    def cached(self) -> list[tuple[int, int]]:
        """(block id, key) of what the prefix cache can find."""
        return [(block.block_id, key) for key, block in self._cached.items()]

    def find(self, keys: Iterable[int]) -> list[Block]:
        """The cached blocks of the longest known prefix."""
        found: list[Block] = []
        for key in keys:
            block = self._cached.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def touch(self, blocks: Sequence[Block]) -> None:
        """Takes one reference on each."""
        for block in blocks:
            if block.ref_cnt == 0:
                self._free.pop(block.block_id)
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None:
        """Gives one reference back on each; the first one freed is the first reused."""
        for block in ordered_blocks:
            assert block.ref_cnt > 0, f"block {block.block_id} is freed, and is free already"
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                self._free[block.block_id] = block

    def allocate(self, count: int) -> list[Block] | None:
        """`count` blocks with one reference each, or None when fewer are free."""
        if count > len(self._free):
            return None
        taken: list[Block] = []
        for _ in range(count):
            _, block = self._free.popitem(last=False)
            block.ref_cnt = 1
            if block.key is not None:
                if self._cached.get(block.key) is block:
                    del self._cached[block.key]
                block.key = None
            taken.append(block)
        return taken

    def cache(self, block: Block, key: int) -> None:
        """The block will hold the full prefix that `key` names."""
        if block.key is None:
            block.key = key
            self._cached.setdefault(key, block)


class SimRequestStatus(enum.Enum):
    WAITING = "waiting"
    PARKED = "parked"  # its KV comes from elsewhere
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class SimRequest:
    """A sequence in the engine; implements the halves' `Prompt`.

    prompt_token_ids include what another engine has generated already.
    cached_tokens, external_tokens: of its first scheduling, for its first delta.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: Sampling
    max_tokens: int
    arrived: float
    block_size: int
    priority: int = 0
    cache_salt: str | None = None
    kv_transfer_params: Mapping[str, Any] | None = None
    trace_headers: Mapping[str, str] | None = None
    status: SimRequestStatus = SimRequestStatus.WAITING
    output_token_ids: list[int] = field(default_factory=list[int])
    blocks: list[Block] = field(default_factory=list[Block])
    num_computed_tokens: int = 0
    cached_tokens: int = 0
    external_tokens: int = 0
    waited_s: float = 0.0
    parked_at: float = 0.0
    finish_reason: str | None = None

    def __post_init__(self) -> None:
        self.states: list[int] = []
        extend_states(self.states, self.prompt_token_ids)
        self.sampler = Sampler(self.sampling, random.Random(self.request_id))

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.states)

    @property
    def block_hashes(self) -> list[int]:
        return self.states[self.block_size - 1 :: self.block_size]

    @property
    def block_ids(self) -> list[int]:
        return [block.block_id for block in self.blocks]

    def take(self, token: int) -> None:
        """One more generated token; its KV is not computed yet."""
        self.output_token_ids.append(token)
        extend_states(self.states, [token])
        if len(self.output_token_ids) >= self.max_tokens:
            self.finish_reason = "length"
