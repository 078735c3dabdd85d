"""The requests that a Forwarder has had lately, and what it decided about each, for `dynamo-lite
explain`. A note is written while its request is on the way, as the message that `explain` gets.
"""

import itertools
import re
import time
from collections import deque

from dynamo_lite.forward.options import ForwarderConfig
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.decisions import decode_explain
from dynamo_lite.protocol.forwarding import (
    ForwardAttempt,
    ForwardDecision,
    ForwardExplained,
    LegTaken,
)

#: How many requests are remembered.
MOST = 4096
#: Size limit of one answer, which must fit into one message.
MOST_AT_A_TIME = 256
_TEXT = 1024
#: The id of an answer is near its beginning, whatever the engine and the route. In a text of the
#: answer the quotes would be escaped.
_ID = re.compile(rb'"id"\s*:\s*"([^"\\]{1,256})"')
_HEAD_BYTES = 2048


class RequestNote:
    """One request."""

    def __init__(self, route: str, client_id: str, config: ForwarderConfig):
        self._at = time.monotonic()
        self.message = ForwardDecision(
            ids=[client_id] if client_id else [],
            route=route,
            protocol=config.protocol,
            max_local_prefill_length=config.max_local_prefill_length,
        )

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._at

    def tries(self, attempt: ForwardAttempt, prompt_tokens: int, request_id: str = "") -> None:
        """An attempt begins. request_id: of its legs."""
        message = self.message
        message.prompt_tokens = prompt_tokens
        if not message.attempts:
            of = [one.matched_tokens for one in attempt.choices if one.leg == "decode"]
            message.cached_tokens = of[0] if of else 0
        message.attempts.append(attempt)
        if request_id:
            message.ids.append(request_id)

    def failed(self, why: Exception) -> None:
        """The last attempt has failed."""
        if self.message.attempts:
            self.message.attempts[-1].failure = str(why)[:_TEXT]

    def leg_begins(self, leg: str, engine: str) -> LegTaken:
        """Of the last attempt."""
        taken = LegTaken(leg=leg, engine=engine, after_s=self.age_s)
        self.message.attempts[-1].legs.append(taken)
        return taken

    def leg_ends(self, taken: LegTaken, failure: str = "") -> None:
        """Only the first end counts."""
        if taken.took_s is None:
            taken.failure, taken.took_s = failure, self.age_s - taken.after_s

    def wrote(self, data: bytes) -> None:
        """The client gets these bytes."""
        message = self.message
        if message.first_byte_s is None:
            message.first_byte_s = self.age_s
            if found := _ID.search(data, 0, _HEAD_BYTES):
                message.request_id = found[1].decode(errors="replace")
                message.ids = [one for one in message.ids if one != message.request_id]

    def ended(self, outcome: str) -> None:
        self.message.outcome, self.message.took_s = outcome, self.age_s


class ForwardDecisionLog:
    def __init__(self) -> None:
        self._kept: deque[RequestNote] = deque(maxlen=MOST)

    def append(self, note: RequestNote) -> None:
        self._kept.append(note)

    def answer(self, payload: bytes, lease_id: int) -> bytes:
        """The reply to an `Explain`. Raises ProtocolError."""
        wanted = decode_explain(payload)
        matching = (
            note
            for note in reversed(self._kept)
            if note.age_s <= wanted.within_s
            and wanted.request_id in ("", note.message.request_id, *note.message.ids)
        )
        newest = list(itertools.islice(matching, min(wanted.last, MOST_AT_A_TIME)))
        for note in newest:
            note.message.age_s = note.age_s
        found = [note.message for note in reversed(newest)]
        return encode(ForwardExplained(lease_id=lease_id, decisions=found))
