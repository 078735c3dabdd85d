"""Position in a trace: W3C Trace Context, version 00.

Specification: https://www.w3.org/TR/trace-context/. `tracestate` is not passed on, since nothing
here reads it.
"""

import re
import secrets
from collections.abc import Mapping

import msgspec

TRACEPARENT = "traceparent"

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_LONGEST = 512
_SAMPLED = 1


class TraceContext(msgspec.Struct, frozen=True):
    """One span of one trace."""

    #: 32 lower-case hexadecimal digits.
    trace_id: str
    #: 16 lower-case hexadecimal digits.
    span_id: str
    sampled: bool = True

    def child(self) -> "TraceContext":
        """A new span of the same trace."""
        return TraceContext(self.trace_id, secrets.token_hex(8), self.sampled)

    def headers(self) -> dict[str, str]:
        flags = _SAMPLED if self.sampled else 0
        return {TRACEPARENT: f"00-{self.trace_id}-{self.span_id}-{flags:02x}"}


def new_trace() -> TraceContext:
    return TraceContext(secrets.token_hex(16), secrets.token_hex(8))


def trace_of(headers: Mapping[str, str] | None) -> TraceContext | None:
    """The context in `headers`; None without a valid one.

    The headers are untrusted: anything that differs from the specification is ignored.
    """
    text = headers.get(TRACEPARENT) if headers else None
    if text is None or len(text) > _LONGEST or not (found := _TRACEPARENT.fullmatch(text)):
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == "ff" or (version == "00" and more):
        return None
    if not (trace_id.strip("0") and span_id.strip("0")):
        return None
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & _SAMPLED))


def traced(headers: Mapping[str, str] | None) -> TraceContext | None:
    """As `trace_of`, but None unless the trace is sampled."""
    context = trace_of(headers) if headers else None
    return context if context is not None and context.sampled else None
