"""Requests recent decisions from the Forwarders of a namespace."""

import asyncio
import time
from dataclasses import dataclass

from dynamo_lite.cli.decisions import ANSWER_S
from dynamo_lite.cli.listing import Broker, Place, members, open_broker
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.decisions import Explain
from dynamo_lite.protocol.errors import DeadlineExceeded, NoResponders, ProtocolError
from dynamo_lite.protocol.forwarding import ForwardDecision, decode_forward_explained
from dynamo_lite.runtime.messaging import Messaging


@dataclass(frozen=True)
class PastForward:
    """A request that a Forwarder has had."""

    #: Seconds since the epoch by this host's clock.
    at: float
    #: Of the Forwarder.
    lease_id: int
    decision: ForwardDecision


@dataclass(frozen=True)
class ForwardAnswers:
    """The replies of all Forwarders."""

    #: Oldest first.
    taken: list[PastForward]
    #: Number of Forwarders that replied.
    forwarders: int
    #: Leases, hexadecimal, of those that did not reply.
    silent: list[str]


async def ask_forwarders(place: Place, broker: Broker, wanted: Explain) -> ForwardAnswers:
    """Sends `wanted` to all Forwarders. Raises StartupError, Unavailable."""
    found = [record for record in await members(place) if record.component == "Forwarder"]
    leases = sorted({record.lease_id for record in found})
    if not leases:
        return ForwardAnswers([], 0, [])
    async with open_broker(broker) as messaging:
        answers = await asyncio.gather(
            *(_ask(messaging, place.namespace, lease_id, wanted) for lease_id in leases)
        )
    taken = sorted((each for answer in answers for each in answer or ()), key=lambda t: t.at)
    silent = [f"{one:x}" for one, answer in zip(leases, answers, strict=True) if answer is None]
    return ForwardAnswers(taken, len(leases) - len(silent), silent)


async def _ask(
    messaging: Messaging, namespace: str, lease_id: int, wanted: Explain
) -> list[PastForward] | None:
    """None if the Forwarder does not reply."""
    subject = names.forward_explain_subject(namespace, lease_id)
    try:
        reply = await messaging.request(subject, encode(wanted), timeout_s=ANSWER_S)
        explained = decode_forward_explained(reply)
    except (NoResponders, DeadlineExceeded, ProtocolError):
        return None
    now = time.time()
    return [PastForward(now - d.age_s, explained.lease_id, d) for d in explained.decisions]
