"""The parts of an engine that the scheduler halves use.

vLLM's own classes have these shapes, and the simulated engine's too.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Protocol


class Block(Protocol):
    """One block of the pool. It is not reused while anything holds a reference."""

    @property
    def block_id(self) -> int: ...

    @property
    def is_null(self) -> bool:
        """Whether it is a placeholder for a block that is not needed any more."""
        ...


#: A request's block ids, in the order of its tokens, in each of the model's KV groups.
BlockTables = Sequence[Sequence[int]]


class BlockPool(Protocol):
    """The engine's KV blocks."""

    #: Number of all blocks, whatever the device.
    num_gpu_blocks: int

    @property
    def blocks(self) -> Sequence[Any]: ...

    def touch(self, blocks: Sequence[Any]) -> Any:
        """Takes one more reference to each block."""
        ...

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> Any:
        """Gives back one reference to each block."""
        ...

    def get_num_free_blocks(self) -> int: ...


class Prompt(Protocol):
    """A request as the engine's scheduler holds it."""

    @property
    def request_id(self) -> str: ...

    @property
    def prompt_token_ids(self) -> list[int] | None: ...

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def num_computed_tokens(self) -> int: ...

    @property
    def block_hashes(self) -> Sequence[Hashable]:
        """One per full block: of all tokens up to its end, and of everything else that their
        KV depends on."""
        ...

    @property
    def priority(self) -> int: ...

    @property
    def cache_salt(self) -> str | None: ...

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None:
        """Packed structs of `transfer_params.py`, or None."""
        ...

    @property
    def trace_headers(self) -> Mapping[str, str] | None:
        """None if the request is not traced."""
        ...
