"""Requests recent decisions from the decode engines and the Forwarders of a namespace."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from dynamo_lite.cli.listing import Broker, Place, members, open_broker, open_store
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.decisions import Decision, Explain, decode_explained
from dynamo_lite.protocol.errors import DeadlineExceeded, NoResponders, ProtocolError
from dynamo_lite.protocol.forwarding import ForwardDecision, decode_forward_explained
from dynamo_lite.runtime.messaging import Messaging

#: Timeout for the reply of one engine or Forwarder.
_ANSWER_S = 3.0


class _Aged(Protocol):
    @property
    def age_s(self) -> float: ...


D = TypeVar("D", bound=_Aged)
D_co = TypeVar("D_co", bound=_Aged, covariant=True)


class _Reply(Protocol[D_co]):
    @property
    def lease_id(self) -> int: ...

    @property
    def decisions(self) -> Sequence[D_co]: ...


@dataclass(frozen=True)
class Past(Generic[D]):
    """A decision that was made."""

    #: Seconds since the epoch by this host's clock.
    at: float
    #: Of the decode worker or the Forwarder.
    lease_id: int
    decision: D


PastDecision = Past[Decision]
PastForward = Past[ForwardDecision]


@dataclass(frozen=True)
class Answers(Generic[D]):
    """The replies of all decode engines, or of all Forwarders."""

    #: Oldest first.
    taken: list[Past[D]]
    #: Number of those that replied.
    replied: int
    #: Those that did not: ids of engines, or leases of Forwarders, hexadecimal.
    silent: list[str]


async def ask_engines(place: Place, broker: Broker, wanted: Explain) -> Answers[Decision]:
    """Sends `wanted` to all decode engines. Raises StartupError, Unavailable."""
    async with open_store(place) as store:
        prefix = names.nixl_metadata_prefix(place.namespace)
        found = [key.removeprefix(prefix) for key in await store.get_prefix(prefix)]
    engines = sorted(engine for engine in found if names.is_engine_id(engine))
    subjects = {engine: names.explain_subject(place.namespace, engine) for engine in engines}
    return await _ask_all(broker, subjects, wanted, decode_explained)


async def ask_forwarders(place: Place, broker: Broker, wanted: Explain) -> Answers[ForwardDecision]:
    """Sends `wanted` to all Forwarders. Raises StartupError, Unavailable."""
    found = [record for record in await members(place) if record.component == "Forwarder"]
    leases = sorted({record.lease_id for record in found})
    if not leases:
        return Answers([], 0, [])
    subjects = {f"{one:x}": names.forward_explain_subject(place.namespace, one) for one in leases}
    return await _ask_all(broker, subjects, wanted, decode_forward_explained)


async def _ask_all(
    broker: Broker,
    subjects: Mapping[str, str],
    wanted: Explain,
    decode: Callable[[bytes], _Reply[D]],
) -> Answers[D]:
    """subjects: by the name of who is asked."""
    async with open_broker(broker) as messaging:
        answers = await asyncio.gather(
            *(_ask(messaging, subject, wanted, decode) for subject in subjects.values())
        )
    taken = sorted((each for answer in answers for each in answer or ()), key=lambda t: t.at)
    silent = [name for name, answer in zip(subjects, answers, strict=True) if answer is None]
    return Answers(taken, len(subjects) - len(silent), silent)


async def _ask(
    messaging: Messaging, subject: str, wanted: Explain, decode: Callable[[bytes], _Reply[D]]
) -> list[Past[D]] | None:
    """None without a reply."""
    try:
        told = decode(await messaging.request(subject, encode(wanted), timeout_s=_ANSWER_S))
    except (NoResponders, DeadlineExceeded, ProtocolError):
        return None
    now = time.time()
    return [Past(now - each.age_s, told.lease_id, each) for each in told.decisions]
