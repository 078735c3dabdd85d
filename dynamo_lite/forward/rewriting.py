"""Changes to an answer on its way to the client, where a protocol needs any.

Most answers pass as bytes. Where something must change, a stream is cut into whole events, and only
events that contain what changes are parsed.
"""

from collections.abc import Callable
from dataclasses import dataclass

from dynamo_lite.forward import input_logprobs
from dynamo_lite.forward.input_logprobs import InputLogprobs
from dynamo_lite.forward.protocols.base import Leg, PrefillAnswer
from dynamo_lite.forward.usage import MARK, cached_by_prefill, with_cached_tokens


@dataclass(frozen=True, slots=True)
class Changes:
    """What changes in an answer. The default changes nothing."""

    #: Number of cached tokens for the usage; None: unchanged.
    cached_tokens: int | None = None
    #: A request id of ours that contains addresses, and its replacement.
    hidden: tuple[bytes, bytes] | None = None
    #: The prefill engine's log probabilities.
    logprobs: InputLogprobs | None = None

    @property
    def any(self) -> bool:
        return not (self.cached_tokens is self.hidden is self.logprobs is None)

    def whole(self, data: bytes) -> bytes:
        """Changes an answer that is one JSON document."""
        if self.hidden is not None:
            data = data.replace(*self.hidden)
        if self.cached_tokens is not None:
            data = with_cached_tokens(data, self.cached_tokens)
        return data if self.logprobs is None else self.logprobs.joined(data)

    def events(self, data: bytes) -> bytes:
        """Changes whole events."""
        if self.hidden is not None:
            data = data.replace(*self.hidden)
        cached, logprobs = self.cached_tokens, self.logprobs
        if cached is not None:
            data = _each(data, MARK, lambda event: with_cached_tokens(event, cached))
        return data if logprobs is None else _each(data, input_logprobs.MARK, logprobs.joined)


def _each(data: bytes, mark: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """Changes the JSON of the events that contain the mark."""
    if mark not in data:
        return data
    return b"\n".join(
        _with_change(line, change) if line.startswith(b"data:") and mark in line else line
        for line in data.split(b"\n")
    )


def _with_change(line: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """A line without its LF. It keeps the CR of a CRLF."""
    return b"data: " + change(line[5:].strip()) + (b"\r" if line.endswith(b"\r") else b"")


UNCHANGED = Changes()


def changes_for(
    leg: Leg,
    answer: PrefillAnswer,
    logprobs: InputLogprobs | None = None,
) -> Changes:
    """The changes for the answer of this leg. answer, logprobs: of the prefill leg."""
    cached, hidden = cached_by_prefill(answer, leg.body), None
    if leg.hidden is not None:
        found, shown = leg.hidden
        hidden = (found.encode(), shown.encode())
    if cached is hidden is logprobs is None:
        return UNCHANGED
    return Changes(cached_tokens=cached, hidden=hidden, logprobs=logprobs)
