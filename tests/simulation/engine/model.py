"""The model: what KV a token has, and which token follows.

The KV of position i is a digest of the tokens 0 to i, and the next token a
digest of the KV of the whole sequence, read out of the blocks. So the right
answer follows from the prompt alone, and any wrong byte changes it.
"""

import random
import zlib
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.errors import Refused

Words = npt.NDArray[np.uint64]

#: Token ids are below this.
VOCABULARY = 1 << 30
#: Low bits of a token that plain (unseeded) sampling leaves to chance.
_CHANCE = 0xFF

_MASK = (1 << 64) - 1
_START = 0x9E3779B97F4A7C15
#: Constants that make the KV of the planes differ.
_PLANE_SALTS = np.array([[0x0], [0xA5A5A5A5A5A5A5A5], [0x3C3C3C3C3C3C3C3C]], np.uint64)
PLANES = len(_PLANE_SALTS)


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


_decode_sampling = msgspec.msgpack.Decoder(Sampling).decode


def sampling_to_bytes(sampling: Sampling) -> bytes:
    return encode(sampling)


def sampling_from_bytes(raw: bytes) -> Sampling:
    """Raises Refused."""
    try:
        return _decode_sampling(raw)
    except msgspec.DecodeError as exc:
        raise Refused(f"malformed sampling parameters: {exc}", elsewhere=False) from exc


def extend_states(states: list[int], tokens: Iterable[int]) -> None:
    """Appends one state (a digest of everything up to it) per token."""
    state = states[-1] if states else _START
    for token in tokens:
        state = ((state ^ (token + 1)) * 0xD6E8FEB86659FD93) & _MASK
        state ^= state >> 32
        states.append(state)


def kv_words(states: Sequence[int]) -> Words:
    """The KV of these positions: shape (PLANES, len(states))."""
    return np.array(states, np.uint64)[None, :] ^ _PLANE_SALTS


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
