"""Answers of JetStream that cannot be read: nats-py raises what its code happens to run into."""

import contextlib
from collections.abc import Iterator

import msgspec

from dynamo_lite.protocol.errors import BrokerUnavailable

#: What reading an answer raises that is no JSON, lacks a field, or has one of another type. JSON
#: that is nested too deeply is a RecursionError.
MALFORMED = (
    AttributeError,
    LookupError,
    OverflowError,
    RecursionError,
    TypeError,
    ValueError,
    msgspec.DecodeError,
)


@contextlib.contextmanager
def readable(what: str) -> Iterator[None]:
    """Raises BrokerUnavailable instead, for code that only requests and reads answers."""
    try:
        yield
    except MALFORMED as exc:
        raise BrokerUnavailable(f"{what}: malformed answer of JetStream: {exc!r}") from exc
