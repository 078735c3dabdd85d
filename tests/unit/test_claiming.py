"""Asking for a claim: again without an answer, and what the caller must take back."""

import contextlib
from collections.abc import AsyncIterator

import pytest

from dynamo_lite.disagg.prefill.claims import TRIES, ask_claim
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.errors import DeadlineExceeded, NoResponders
from dynamo_lite.protocol.prefill import Claim, ClaimRefused, Granted, decode_claim
from tests.twins.servers import MemoryMessaging

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

CLAIM = Claim(attempt="a1", writer_lease_id=7, held_s=0.5, number=3)
TRY_S = 0.05
GRANTED = encode(Granted())
WITHDRAWN = encode(ClaimRefused(reason="withdrawn"))


@contextlib.asynccontextmanager
async def engine(*replies: bytes | None) -> AsyncIterator[tuple[MemoryMessaging, list[Claim]]]:
    """Answers one claim after the other; None: not at all."""
    messaging, heard = MemoryMessaging(), list[Claim]()

    async def on_claim(payload: bytes) -> bytes | None:
        heard.append(decode_claim(payload))
        return replies[len(heard) - 1]

    async with messaging, messaging.serve("claim", on_claim):
        yield messaging, heard


async def ask(messaging: MemoryMessaging) -> Granted | ClaimRefused:
    return await ask_claim(messaging, "claim", CLAIM, timeout_s=TRY_S)


async def test_a_claim_that_is_not_answered_is_made_again_and_says_for_how_long_the_job_is_held():
    async with engine(None, None, GRANTED) as (messaging, heard):
        assert await ask(messaging) == Granted()
    assert [claim.number for claim in heard] == [3, 3, 3]
    assert [claim.held_s for claim in heard] == pytest.approx([0.5, 0.55, 0.6])


async def test_it_ends():
    async with engine(*[None] * TRIES) as (messaging, heard):
        with pytest.raises(DeadlineExceeded, match=r"no answer within 0\.15 s"):
            await ask(messaging)
    assert len(heard) == TRIES


async def test_a_claim_that_is_not_wanted_any_more_is_not_made_again():
    async with engine(None, GRANTED) as (messaging, heard):
        with pytest.raises(DeadlineExceeded):
            await ask_claim(messaging, "claim", CLAIM, timeout_s=TRY_S, wanted=lambda: not heard)
    assert len(heard) == 1


async def test_a_refusal_behind_a_silence_may_follow_a_grant():
    async with engine(None, WITHDRAWN) as (messaging, _):
        with pytest.raises(DeadlineExceeded):
            await ask(messaging)


async def test_who_is_gone_after_a_silence_may_have_granted_it():
    ends = [DeadlineExceeded("request to claim", TRY_S), NoResponders("nobody serves claim")]

    class Leaving(MemoryMessaging):
        async def request(self, subject: str, payload: bytes, *, timeout_s: float) -> bytes:
            raise ends.pop(0)

    with pytest.raises(DeadlineExceeded):
        await ask(Leaving())
    assert not ends
