"""Changes to an answer on its way to the client, where a protocol needs any.

Most answers pass as bytes. Where something must change, a stream is cut into whole events, and only
events that contain what changes are parsed.
"""

from collections.abc import Callable
from dataclasses import dataclass

from dynamo_lite.forward import engine_answer, input_logprobs
from dynamo_lite.forward.input_logprobs import InputLogprobs
from dynamo_lite.forward.protocols.base import Attempt, ForwardProtocol, Leg, PrefillAnswer
from dynamo_lite.forward.usage import MARK, cached_by_prefill, with_cached_tokens


class EventCutter:
    """Cuts a stream of server-sent events at their ends."""

    def __init__(self) -> None:
        #: An incomplete event, in the pieces in which it has come.
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> bytes:
        """The whole events so far; an incomplete one is kept. Raises TooLarge."""
        end = data.rfind(b"\n\n") + 2
        if end < 2 and data.startswith(b"\n") and self._parts and self._parts[-1].endswith(b"\n"):
            end = 1  # the two line breaks came in two pieces
        elif end < 2:
            self._keep(data)
            return b""
        self._parts.append(data[:end])
        events = self.flush()
        self._keep(data[end:])
        return events

    def flush(self) -> bytes:
        """What is left at the end of the stream."""
        parts, self._parts, self._size = self._parts, [], 0
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _keep(self, data: bytes) -> None:
        if not data:
            return
        self._parts.append(data)
        self._size += len(data)
        if self._size > engine_answer.MAX_WHOLE_BYTES:
            raise engine_answer.TooLarge


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
        b"data: " + change(line[5:].strip()) if line.startswith(b"data:") and mark in line else line
        for line in data.split(b"\n")
    )


UNCHANGED = Changes()


def changes_for(
    protocol: ForwardProtocol,
    attempt: Attempt,
    leg: Leg,
    answer: PrefillAnswer,
    logprobs: InputLogprobs | None = None,
) -> Changes:
    """The changes for the answer of this leg. answer, logprobs: of the prefill leg."""
    cached, hidden = cached_by_prefill(answer), None
    if protocol.hides_ids:
        hidden = (leg.headers["x-request-id"].encode(), attempt.unique.encode())
    if cached is hidden is logprobs is None:
        return UNCHANGED
    return Changes(cached_tokens=cached, hidden=hidden, logprobs=logprobs)
