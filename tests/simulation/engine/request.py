"""A sequence inside a simulated engine."""

import enum
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.simulation.engine.model import Sampler, Sampling, extend_states
from tests.simulation.engine.pool import Block


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
