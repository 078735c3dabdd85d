"""The requests that a Forwarder has had lately, and what it decided about each.

A note is made while its request is on the way (`notes.py`); it becomes a message when `explain`
asks for it.
"""

import itertools
from collections import deque

from dynamo_lite.forward.notes import NOW, AttemptNote, LegNote, Now, RequestNote
from dynamo_lite.forward.options import ForwarderConfig
from dynamo_lite.forward.placing import ChosenEngine
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.decisions import decode_explain
from dynamo_lite.protocol.forwarding import (
    ForwardAttempt,
    ForwardDecision,
    ForwardExplained,
    LegCandidate,
    LegChoice,
    LegTaken,
)

#: How many requests are remembered, and for how many seconds.
MOST, LONGEST_S = 4096, 900.0
#: Size limit of one answer, which must fit into one message.
MOST_AT_A_TIME = 256
#: Candidates of a choice that are shown.
_SHOWN = 8
_TEXT = 1024


class ForwardDecisionLog:
    """now: the clock of the notes."""

    def __init__(self, config: ForwarderConfig, now: Now = NOW):
        self._config, self._now = config, now
        self._kept: deque[RequestNote] = deque(maxlen=MOST)

    def __len__(self) -> int:
        return len(self._kept)

    def append(self, note: RequestNote) -> None:
        """Adds a request, and forgets those that are too old."""
        self._kept.append(note)
        oldest = note.at - LONGEST_S
        while self._kept[0].at < oldest:
            self._kept.popleft()

    def answer(self, payload: bytes, lease_id: int) -> bytes:
        """The reply to an `Explain`. Raises ProtocolError."""
        wanted, now = decode_explain(payload), self._now()
        oldest = now - min(wanted.within_s, LONGEST_S)
        matching = (
            note
            for note in reversed(self._kept)
            if note.at >= oldest and (not wanted.request_id or note.known_as(wanted.request_id))
        )
        newest = list(itertools.islice(matching, min(wanted.last, MOST_AT_A_TIME)))
        found = [self._as_message(note, now) for note in reversed(newest)]
        return encode(ForwardExplained(lease_id=lease_id, decisions=found))

    def _as_message(self, note: RequestNote, now: float) -> ForwardDecision:
        attempts = [_attempt(note, number) for number in range(len(note.attempts))]
        decode = next((one for one in note.choices if one.leg == "decode"), None)
        return ForwardDecision(
            request_id=note.answer_id,
            ids=note.ids,
            age_s=now - note.at,
            route=note.route[:_TEXT],
            protocol=self._config.protocol,
            prompt_tokens=note.attempts[0].prompt_tokens if note.attempts else 0,
            cached_tokens=decode.choice.view.matched if decode is not None else 0,
            max_local_prefill_length=self._config.max_local_prefill_length,
            how=note.how,
            reason=note.reason,
            attempts=attempts,
            status=note.status,
            outcome=note.outcome,
            error=note.error[:_TEXT],
            first_byte_s=_since(note.at, note.first_byte_at),
            took_s=_since(note.at, note.ended_at),
        )


def _attempt(note: RequestNote, number: int) -> ForwardAttempt:
    attempts = note.attempts
    attempt: AttemptNote = attempts[number]
    end = attempts[number + 1].first_choice if number + 1 < len(attempts) else len(note.choices)
    # A leg may be chosen twice: the last choice counts.
    choices = {one.leg: _choice(one) for one in note.choices[attempt.first_choice : end]}
    return ForwardAttempt(
        order=attempt.order,
        alone=attempt.alone,
        choices=[choices[leg] for leg in ("prefill", "decode") if leg in choices],
        legs=[_leg(note, leg) for leg in attempt.legs],
        failure=attempt.failure[:_TEXT],
    )


def _choice(chosen: ChosenEngine) -> LegChoice:
    choice = chosen.choice
    pairs = list(zip(chosen.names, choice.views, strict=True))
    pairs.sort(key=lambda pair: pair[1] is not choice.view)
    return LegChoice(
        leg=chosen.leg,
        engine=chosen.engine,
        reason=choice.reason,
        candidates=[
            LegCandidate(
                engine=name,
                matched_tokens=view.matched,
                load_tokens=view.load,
                kv_usage=view.kv_usage,
                score=choice.scores.get(view.engine),
            )
            for name, view in pairs[:_SHOWN]
        ],
        of=len(pairs),
    )


def _leg(note: RequestNote, leg: LegNote) -> LegTaken:
    return LegTaken(
        leg=leg.leg,
        engine=leg.engine,
        status=leg.status,
        failure=leg.failure,
        after_s=leg.began_at - note.at,
        head_s=_since(leg.began_at, leg.head_at),
        took_s=_since(leg.began_at, leg.ended_at),
    )


def _since(start: float, end: float | None) -> float | None:
    return None if end is None else end - start
