"""What is asked of the graph: the requests of a trace."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from dynamo_lite.policy.routing.kv_chain import ChainHash, chain_hashes


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace."""

    #: Seconds from the start of the run.
    arrival_s: float
    prompt_tokens: int
    #: At least 1.
    output_tokens: int
    #: The trace's names of the prompt's full blocks; empty: it shares no prefix.
    blocks: tuple[int, ...] = ()
    #: Their chain hashes.
    hashes: tuple[ChainHash, ...] = ()
    session: str | None = None


def tokens_of(blocks: Iterable[int], block_tokens: int) -> "array[int]":
    """Token ids of a prompt with these blocks: equal blocks have equal tokens."""
    made = array("I")
    for block in blocks:
        made.frombytes((block & 0xFFFFFFFF).to_bytes(4, "little") * block_tokens)
    return made


def with_blocks(
    arrival_s: float,
    prompt_tokens: int,
    output_tokens: int,
    blocks: Iterable[int],
    block_tokens: int,
    session: str | None = None,
) -> TraceRequest:
    """A request whose prompt has these blocks; only full ones can be shared."""
    full = tuple(blocks)[: prompt_tokens // block_tokens]
    hashes = tuple(chain_hashes(tokens_of(full, block_tokens), block_tokens))
    return TraceRequest(arrival_s, prompt_tokens, output_tokens, full, hashes, session)
