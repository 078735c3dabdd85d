"""Requests recent decisions from the decode engines of a namespace."""

import asyncio
import time
from dataclasses import dataclass

from dynamo_lite.cli.listing import Broker, Place, open_broker, open_store
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.decisions import Decision, Explain, decode_explained
from dynamo_lite.protocol.errors import DeadlineExceeded, NoResponders, ProtocolError
from dynamo_lite.runtime.messaging import Messaging

#: Timeout for the reply of one engine or Forwarder.
ANSWER_S = 3.0


@dataclass(frozen=True)
class PastDecision:
    """A decision that an engine made."""

    #: Seconds since the epoch by this host's clock.
    at: float
    #: Of the decode worker.
    lease_id: int
    decision: Decision


@dataclass(frozen=True)
class Answers:
    """The replies of all decode engines."""

    #: Oldest first.
    taken: list[PastDecision]
    #: Number of engines that replied.
    engines: int
    #: Ids of the engines that did not reply.
    silent: list[str]


async def ask_engines(place: Place, broker: Broker, wanted: Explain) -> Answers:
    """Sends `wanted` to all decode engines. Raises StartupError, Unavailable."""
    async with open_store(place) as store:
        prefix = names.nixl_metadata_prefix(place.namespace)
        found = [key.removeprefix(prefix) for key in await store.get_prefix(prefix)]
    engines = sorted(engine for engine in found if names.is_engine_id(engine))
    async with open_broker(broker) as messaging:
        answers = await asyncio.gather(
            *(_ask_engine(messaging, place.namespace, engine, wanted) for engine in engines)
        )
    taken = sorted((each for answer in answers for each in answer or ()), key=lambda t: t.at)
    silent = [engine for engine, answer in zip(engines, answers, strict=True) if answer is None]
    return Answers(taken, len(engines) - len(silent), silent)


async def _ask_engine(
    messaging: Messaging, namespace: str, engine: str, wanted: Explain
) -> list[PastDecision] | None:
    """None if the engine does not reply."""
    subject = names.explain_subject(namespace, engine)
    try:
        reply = await messaging.request(subject, encode(wanted), timeout_s=ANSWER_S)
        explained = decode_explained(reply)
    except (NoResponders, DeadlineExceeded, ProtocolError):
        return None
    now = time.time()
    return [PastDecision(now - d.age_s, explained.lease_id, d) for d in explained.decisions]
