"""The words for stock engines, and a Forwarder's report of its past decisions, which answers
`Explain` of `decisions.py`.

Times are durations, since the clocks of two hosts differ. What a request may still add to is not
frozen.
"""

from collections.abc import Mapping
from typing import Literal

import msgspec

from dynamo_lite.protocol.codec import Decoder
from dynamo_lite.protocol.decisions import Word
from dynamo_lite.protocol.records import LeaseId, Natural, Text

EngineRole = Literal["prefill", "decode", "prefill-decode"]
#: The component that registers engines of a role.
JOINED_AS: Mapping[str, str] = {
    "prefill": "PrefillEngine",
    "decode": "DecodeEngine",
    "prefill-decode": "Engine",
}
#: The keys of `forward/protocols/registry.py`.
ProtocolName = Literal[
    "nixl",
    "nixl-push",
    "mooncake",
    "llumnix-mooncake",
    "moriio-read",
    "moriio-write",
    "sglang",
    "neuron-static",
    "neuron-dynamic",
    "kvt-batch",
    "kvt-staged",
]


class LegChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Which engine was to take a leg, and why. Amounts are estimated tokens."""

    #: prefill or decode.
    leg: Word
    #: HOST:PORT.
    engine: Text
    #: As in the metric `dynamo_lite_forward_choices_total`.
    reason: Word
    #: Number of engines that could have taken it.
    of: Natural = 0
    #: Tokens of the prompt that are assumed to be in the engine's prefix cache.
    matched_tokens: Natural = 0
    #: Tokens that it computes before this prompt.
    load_tokens: int = 0
    kv_usage: float = 0.0


class LegTaken(msgspec.Struct, kw_only=True):
    """One request to an engine."""

    leg: Word
    engine: Text
    #: HTTP status of its answer; 0: no answer.
    status: Natural = 0
    #: Why it failed; empty if it did not.
    failure: Text = ""
    #: Seconds from the request's decision until it was sent.
    after_s: float = 0.0
    #: Seconds until the head of the answer; None: it did not come.
    head_s: float | None = None
    #: Seconds until its end; None: it is in flight.
    took_s: float | None = None


class ForwardAttempt(msgspec.Struct, kw_only=True):
    """One try of a request."""

    #: serial, parallel or single; empty without a prefill leg.
    order: Word = ""
    #: Why it has no prefill leg; empty if it has one.
    alone: Word = ""
    choices: list[LegChoice] = []
    legs: list[LegTaken] = []
    #: Why another attempt, or an error, followed; empty if none did.
    failure: Text = ""


class ForwardDecision(msgspec.Struct, kw_only=True):
    """The course of one request to generate."""

    #: Id of the client's answer; empty if it is not known.
    request_id: Text = ""
    #: Other ids by which it can be asked for: the client's X-Request-Id and those of its attempts.
    ids: list[Text]
    #: Since the request had been received.
    age_s: float = 0.0
    route: Text
    protocol: Word
    #: Estimated tokens: of the prompt, and those cached at the decode engine that was chosen
    #: first.
    prompt_tokens: Natural = 0
    cached_tokens: Natural = 0
    #: Up to this many uncached tokens a prompt gets no prefill leg; 0: each gets one.
    max_local_prefill_length: Natural
    #: disaggregated or alone; empty: no answer was begun.
    how: Word = ""
    #: Why it was alone.
    reason: Word = ""
    attempts: list[ForwardAttempt] = []
    #: HTTP status of the client's answer; 0: no answer.
    status: Natural = 0
    #: answered, broken, client gone or failed (by a fault here); empty while it is in flight.
    outcome: Word = ""
    #: Why no engine could be asked; empty if one could.
    error: Text = ""
    #: Seconds until the client's first byte, and until the end.
    first_byte_s: float | None = None
    took_s: float | None = None


class ForwardExplained(msgspec.Struct, frozen=True, kw_only=True):
    """A Forwarder's answer, oldest decision first."""

    lease_id: LeaseId
    decisions: list[ForwardDecision]


decode_forward_explained: Decoder[ForwardExplained] = Decoder(ForwardExplained)
