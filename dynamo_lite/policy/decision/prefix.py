"""Read a prefix that only the decode engine holds, or compute it?

A read costs a turn of the scheduler and a transfer, whatever its length. A short prefix is computed
faster, in the step that computes the rest anyway.
"""

import enum
from dataclasses import dataclass


class PrefixReason(enum.Enum):
    LONG = "long"
    SHORT = "short"
    CACHED = "cached"  # the prefill engine has all of it
    NOT_HELD = "not_held"  # the decode engine has none, or cannot guarantee its contents


@dataclass(frozen=True)
class Read:
    """Load `tokens` tokens, beyond those that are cached, from the decode engine."""

    tokens: int
    reason: PrefixReason


@dataclass(frozen=True)
class Compute:
    """Compute everything that is not cached."""

    reason: PrefixReason


def read_or_compute(
    *, held_tokens: int, cached_tokens: int, min_read_tokens: int
) -> Read | Compute:
    """The verdict for one job.

    held_tokens: prefix that can be read from the decode engine, from the prompt's start.
    cached_tokens: the prefill engine's own hit. Both are whole blocks. min_read_tokens: a shorter
    read does not pay.
    """
    if held_tokens == 0:
        return Compute(PrefixReason.NOT_HELD)
    missing = held_tokens - cached_tokens
    if missing <= 0:
        return Compute(PrefixReason.CACHED)
    if missing < min_read_tokens:
        return Compute(PrefixReason.SHORT)
    return Read(missing, PrefixReason.LONG)
