"""Asking for a claim, again where there is no answer: an engine in a long step answers late."""

from collections.abc import Callable

import msgspec

from dynamo_lite.protocol.codec import encode_sealed
from dynamo_lite.protocol.errors import DeadlineExceeded, Unavailable
from dynamo_lite.protocol.prefill import Claim, ClaimRefused, Granted, decode_claim_reply
from dynamo_lite.runtime.messaging import Messaging

#: With 2 s each it is about as long as an engine that does not answer is taken to work.
TRIES = 3


async def ask(
    messaging: Messaging,
    subject: str,
    claim: Claim,
    *,
    timeout_s: float,
    wanted: Callable[[], bool] = lambda: True,
) -> Granted | ClaimRefused:
    """The answer of the decode engine. timeout_s: of each try. wanted: whether the claim still
    is; if not, there is no further try.

    All tries are the same claim: the engine grants it again to whoever holds it. Raises
    NoResponders: it was not granted. Raises DeadlineExceeded, BrokerUnavailable or
    ProtocolError: it may have been granted, and must be taken back. A refusal that follows a
    try without an answer raises DeadlineExceeded: that try may have been granted, and
    withdrawn since.
    """
    unanswered: DeadlineExceeded | None = None
    for tried in range(TRIES):
        if unanswered is not None and not wanted():
            break
        now = msgspec.structs.replace(claim, held_s=claim.held_s + tried * timeout_s)
        try:
            reply = await messaging.request(subject, encode_sealed(now), timeout_s=timeout_s)
        except DeadlineExceeded:
            unanswered = DeadlineExceeded(f"request to {subject}", (tried + 1) * timeout_s)
            continue
        except Unavailable:
            if unanswered is not None:
                break
            raise
        answer = decode_claim_reply(reply)
        if unanswered is not None and isinstance(answer, ClaimRefused):
            break
        return answer
    assert unanswered is not None
    raise unanswered
