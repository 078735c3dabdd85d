"""Changes to an answer on its way to the client, where a protocol needs any.

Most answers pass as bytes. Where something must change, a stream is cut into whole events, and only
events that contain what changes are parsed.
"""

from dataclasses import dataclass

from dynamo_lite.forward.protocols.base import Attempt, ForwardProtocol, Leg, PrefillAnswer
from dynamo_lite.forward.usage import MARK, cached_by_prefill, with_cached_tokens


class EventCutter:
    """Cuts a stream of server-sent events at their ends."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """The whole events so far; an incomplete one is kept."""
        data = self._rest + data
        end = data.rfind(b"\n\n") + 2
        if end < 2:
            self._rest = data
            return b""
        self._rest = data[end:]
        return data[:end]

    def flush(self) -> bytes:
        """What is left at the end of the stream."""
        rest, self._rest = self._rest, b""
        return rest


@dataclass(frozen=True, slots=True)
class Changes:
    """What changes in an answer. The default changes nothing."""

    #: For the usage.
    cached_tokens: int | None = None
    #: An id of ours with addresses in it, and what replaces it.
    hidden: tuple[bytes, bytes] | None = None

    @property
    def any(self) -> bool:
        return self.cached_tokens is not None or self.hidden is not None

    def whole(self, data: bytes) -> bytes:
        """Of an answer that is one JSON document."""
        if self.hidden is not None:
            data = data.replace(*self.hidden)
        if self.cached_tokens is not None:
            data = with_cached_tokens(data, self.cached_tokens)
        return data

    def events(self, data: bytes) -> bytes:
        """Of whole events."""
        if self.hidden is not None:
            data = data.replace(*self.hidden)
        if self.cached_tokens is None or MARK not in data:
            return data
        return b"\n".join(self._line(line, self.cached_tokens) for line in data.split(b"\n"))

    def _line(self, line: bytes, cached: int) -> bytes:
        if not line.startswith(b"data:") or MARK not in line:
            return line
        return b"data: " + with_cached_tokens(line[5:].strip(), cached)


UNCHANGED = Changes()


def changes_for(
    protocol: ForwardProtocol, attempt: Attempt, leg: Leg, answer: PrefillAnswer
) -> Changes:
    """What has to change in the answer of this leg. answer: of the prefill leg."""
    cached, hidden = cached_by_prefill(answer), None
    if protocol.hides_ids:
        hidden = (leg.headers["x-request-id"].encode(), attempt.unique.encode())
    if cached is None and hidden is None:
        return UNCHANGED
    return Changes(cached_tokens=cached, hidden=hidden)
