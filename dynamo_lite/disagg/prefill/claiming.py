"""Requests a claim, with retries after a timeout: an engine in a long step answers late."""

from collections.abc import Callable

import msgspec

from dynamo_lite.protocol.codec import encode_sealed
from dynamo_lite.protocol.errors import DeadlineExceeded, Unavailable
from dynamo_lite.protocol.prefill import Claim, ClaimRefused, Granted, decode_claim_reply
from dynamo_lite.runtime.messaging import Messaging

#: With 2 s each, about the time after which an engine counts as unresponsive.
TRIES = 3


async def ask(
    messaging: Messaging,
    subject: str,
    claim: Claim,
    *,
    timeout_s: float,
    wanted: Callable[[], bool] = lambda: True,
) -> Granted | ClaimRefused:
    """Returns the decode engine's reply. timeout_s: for each try. wanted: whether the claim is
    still wanted; if not, it is not tried again.

    All tries send the same claim; the engine grants a claim again to the worker that holds it.
    Raises NoResponders if it was not granted. Raises DeadlineExceeded, BrokerUnavailable or
    ProtocolError if it may have been granted: the caller must give it back. A refusal after a
    try that timed out raises DeadlineExceeded: that try may have been granted and withdrawn.
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
