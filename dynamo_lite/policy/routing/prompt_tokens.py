"""A prompt's tokens, as far as routing needs them."""

from array import array
from collections.abc import Sequence

from dynamo_lite.policy.routing.kv_chain import ChainHash, chain_hashes


class PromptTokens:
    """token_ids: 0 to 2^32 - 1, else ValueError. cache_salt: of the request."""

    __slots__ = ("_chains", "_ids", "_salt")

    def __init__(self, token_ids: Sequence[int], cache_salt: str | None = None):
        try:
            self._ids = array("I", token_ids)
        except (OverflowError, TypeError) as exc:
            raise ValueError(f"token ids: {exc}") from exc
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
