"""What the scheduler halves see of the engine that they run in.

vLLM's own classes have these shapes; so has the simulated engine.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Protocol


class Block(Protocol):
    """One block of the pool; who holds a reference keeps it from being reused."""

    @property
    def block_id(self) -> int: ...

    @property
    def is_null(self) -> bool:
        """Whether it stands for one that is not needed any more, and holds nothing."""
        ...


class BlockPool(Protocol):
    """num_gpu_blocks: all of them, on whatever device."""

    num_gpu_blocks: int

    @property
    def blocks(self) -> Sequence[Any]: ...

    def touch(self, blocks: Sequence[Any]) -> Any:
        """Takes one more reference to each."""
        ...

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> Any:
        """Gives one reference to each back."""
        ...

    def get_num_free_blocks(self) -> int: ...


class Prompt(Protocol):
    """A request as the engine's scheduler holds it.

    block_hashes: one per full block, of all tokens up to its end and of all else that
    their KV depends on. kv_transfer_params: packed structs of `transfer_params.py`, or None.
    trace_headers: None where it is not traced.
    """

    @property
    def request_id(self) -> str: ...

    @property
    def prompt_token_ids(self) -> list[int] | None: ...

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def num_computed_tokens(self) -> int: ...

    @property
    def block_hashes(self) -> Sequence[Hashable]: ...

    @property
    def priority(self) -> int: ...

    @property
    def cache_salt(self) -> str | None: ...

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None: ...

    @property
    def trace_headers(self) -> Mapping[str, str] | None: ...
