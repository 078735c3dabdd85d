"""Blanks transfer parameters in every answer: they name engines' addresses, and a decode engine of
a bidirectional transfer returns some."""

import re

#: The beginning of transfer parameters. Inside a JSON string its quotes would be escaped.
_PARAMS = re.compile(rb'"(?:kv|ec)_transfer_params"\s*:\s*\{')
_PARAMS_NAME = b"_transfer_params"
#: Such a beginning is shorter.
_TAIL_BYTES = 64


class ParamsBlanker:
    """Replaces the content of transfer parameters with spaces in an answer that comes in pieces.
    The answer's length does not change."""

    def __init__(self) -> None:
        #: The last bytes of the piece before.
        self._tail = b""
        #: Depth of objects inside transfer parameters; 0 outside.
        self._depth = 0
        self._in_string = self._escaped = False

    def feed(self, data: bytes) -> bytes:
        shown = b""
        while data:
            if self._depth:
                end = self._end(data)
                shown, data = shown + b" " * end, data[end:]
                continue
            text = self._tail + data
            found = _PARAMS.search(text) if _PARAMS_NAME in text else None
            if found is None:
                self._tail = text[-_TAIL_BYTES:]
                return shown + data
            begin = found.end() - len(self._tail)
            shown, data = shown + data[:begin], data[begin:]
            self._tail, self._depth = b"", 1
        return shown

    def _end(self, data: bytes) -> int:
        """How many of these bytes are inside."""
        for at, byte in enumerate(data):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped, self._in_string = byte == ord("\\"), byte != ord('"')
            elif byte == ord('"'):
                self._in_string = True
            elif byte in b"{}":
                self._depth += 1 if byte == ord("{") else -1
                if not self._depth:
                    return at
        return len(data)
