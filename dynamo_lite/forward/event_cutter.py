"""Where server-sent events end: at a blank line. Lines end with LF or CRLF.

Of the standard's three line ends, a lone CR is not known here: no engine is known that sends it.
"""

import re

from dynamo_lite.forward import engine_answer

_LF_END, _CRLF_END = b"\n\n", b"\n\r\n"
_BLANK_LINE = re.compile(rb"\n\r?\n")


class EventCutter:
    """Cuts a stream of server-sent events at their ends. No byte is changed."""

    def __init__(self) -> None:
        #: An incomplete event, in the pieces in which it has come.
        self._parts: list[bytes] = []
        self._size = 0
        #: The last bytes of these pieces. The line breaks may come in several pieces.
        self._tail = b""

    def feed(self, data: bytes) -> bytes:
        """The whole events so far; an incomplete one is kept. Raises TooLarge."""
        end = _end(data) or _end(self._tail + data[:2]) - len(self._tail)
        if end <= 0:
            self._keep(data)
            return b""
        self._parts.append(data[:end])
        events = self.flush()
        self._keep(data[end:])
        return events

    def flush(self) -> bytes:
        """What is left at the end of the stream."""
        parts, self._parts, self._size, self._tail = self._parts, [], 0, b""
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _keep(self, data: bytes) -> None:
        if not data:
            return
        self._parts.append(data)
        self._tail = (self._tail + data[-2:])[-2:]
        self._size += len(data)
        if self._size > engine_answer.MAX_WHOLE_BYTES:
            raise engine_answer.TooLarge


def split(events: bytes) -> list[bytes]:
    """The single events, without their ends. Lines inside them keep theirs."""
    return _BLANK_LINE.split(events)


def ends_event(data: bytes) -> bool:
    """Whether the end of these bytes is the end of an event."""
    return data.endswith((_LF_END, _CRLF_END))


def _end(data: bytes) -> int:
    """Where the last whole event ends; 0 without any."""
    lf, crlf = data.rfind(_LF_END), data.rfind(_CRLF_END)
    if crlf > lf:
        return crlf + len(_CRLF_END)
    return lf + len(_LF_END) if lf >= 0 else 0
