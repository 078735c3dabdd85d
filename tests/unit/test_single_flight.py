"""Which requests wait for another request's remote prefill: the policy, and a decode engine's
scheduler half."""

import logging
from typing import Any

import pytest

from dynamo_lite.disagg.decode.single_flight import min_shared_tokens, pays
from dynamo_lite.protocol.options import DisaggOptions
from tests.unit.decode_engine import BLOCK, HELD, QUEUE_SIZE, TIMEOUT_S, Decode, prompt

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")


def test_a_wait_has_to_be_worth_a_remote_prefill_or_what_was_set():
    assert min_shared_tokens(DisaggOptions(max_local_prefill_length=50), 16) == 48
    assert min_shared_tokens(DisaggOptions(max_local_prefill_length=20), 16) == 16
    for least in (5, 0):
        assert min_shared_tokens(DisaggOptions(single_flight_min_length=least), 16) == least


@pytest.mark.parametrize(
    ("uncached", "shared", "leader", "expected"),
    [
        (1000, 1000, 1000, True),
        (1000, 0, 0, False),
        (1000, -64, 1000, False),
        (150, 100, 100, True),
        (150, 99, 100, False),
        # At least half of its own work, and at least half of the leader's.
        (1000, 500, 600, True),
        (1001, 500, 600, False),
        (600, 500, 1000, True),
        (600, 500, 1001, False),
    ],
)
def test_most_of_either_prompt_must_be_shared(uncached, shared, leader, expected):
    found = pays(shared=shared, uncached=uncached, of_leader=leader, least=100)
    assert found is expected


# The scheduler half

WAITS = (None, False)


def sibling(request_id: str, tokens: int = 40, *, shared: int = 1000, of: str = "a") -> Any:
    """A prompt whose first `shared` tokens are those of all prompts `of` that name."""
    own = [of if (i + 1) * BLOCK <= shared else request_id for i in range(tokens // BLOCK)]
    return prompt(request_id, tokens, block_hashes=[f"{name}/{i}" for i, name in enumerate(own)])


def asks(decode: Decode, request: Any, cached: int = 0) -> Any:
    return decode.half.num_new_matched_tokens(request, cached)


async def leads(decode: Decode, request: Any) -> str:
    """Its remote prefill is under way and claimed. Returns its attempt."""
    assert decode.admit(request) > 0
    [attempt] = decode.half.build_step().expect
    await decode.network()
    await decode.claim(attempt)
    return attempt


async def test_nobody_waits_for_kv_that_only_a_window_keeps(decode: Decode):
    for block in decode.pool.blocks[:3]:
        block.is_null = True
    await leads(decode, sibling("r1"))
    assert asks(decode, sibling("r2")) == (39, True)


async def test_siblings_wait_and_then_hit_the_cache(decode: Decode, caplog: Any):
    caplog.set_level(logging.INFO)
    attempt = await leads(decode, sibling("r1"))
    others = [sibling(name) for name in ("r2", "r3", "r4")]
    for _ in range(5):
        assert [asks(decode, other) for other in others] == [WAITS] * 3
        assert decode.half.build_step().expect == {}
    assert sum("waits for the remote prefill of r1" in r.message for r in caplog.records) == 3
    decode.clock.now += 0.5
    await decode.done(attempt)
    decode.output("r1")
    for other in others:
        assert decode.admit(other, cached=36) == 0
    assert decode.counted("decision/remote/long") == 1
    assert decode.counted("decision/local/single_flight") == 3
    assert decode.counted("single_flight/hit") == 3
    assert decode.counted("remote/committed") == 1
    for name in ("r1", "r2", "r3", "r4"):
        decode.finish(name)
    await decode.step()
    decode.assert_clean()


async def test_another_prompt_does_not_wait(decode: Decode):
    await leads(decode, sibling("r1"))
    assert asks(decode, sibling("r2", of="b")) == (39, True)
    assert asks(decode, sibling("r3", 4)) == (0, False)
    assert asks(decode, prompt("r4", 40, prompt_token_ids=None)) == (0, False)
    decode.net.queue_watch.view = None
    assert asks(decode, sibling("r5")) == (0, False)


async def test_a_full_queue_lets_siblings_wait_rather_than_compute(decode: Decode):
    await leads(decode, sibling("r1"))
    decode.sees(jobs=QUEUE_SIZE)
    assert asks(decode, sibling("r2")) == WAITS
    assert asks(decode, sibling("r3", of="b")) == (0, False)


# Leaders that fail, and requests that end


async def test_after_a_failed_leader_one_follower_leads(decode: Decode):
    attempt = await leads(decode, sibling("r1"))
    second, third = sibling("r2"), sibling("r3")
    assert (asks(decode, second), asks(decode, third)) == (WAITS, WAITS)
    await decode.done(attempt, "failed")
    decode.half.build_step()
    # The engine does not know it yet: the leader goes first, and may cache its prefix.
    assert asks(decode, second) == WAITS
    decode.output(failed=["r1"])
    assert decode.admit(second) == 39
    assert asks(decode, third) == WAITS
    assert decode.counted("single_flight/miss") == 2
    attempt = decode.attempt_of("r2")
    await decode.step()
    await decode.claim(attempt)
    await decode.done(attempt, "failed")
    decode.half.build_step()
    decode.output(failed=["r2"])
    # It has waited often enough, for any leader.
    assert decode.admit(sibling("r4")) == 39
    assert decode.admit(third) == 39
    assert decode.counted("remote/writer_failed") == 2


async def test_no_follower_waits_longer_than_the_leader(decode: Decode):
    attempt = await leads(decode, sibling("r1"))
    for _ in range(int(TIMEOUT_S) - 1):
        decode.pass_s(1.0)
        assert await decode.claim(attempt) == HELD
    decode.sees()
    follower = sibling("r2")
    assert asks(decode, follower) == WAITS
    decode.pass_s(1.1)
    decode.sees()
    assert [name for _, name in decode.half.build_step().give_up] == ["r1"]
    decode.output(failed=["r1"])
    assert decode.admit(follower) == 39
    assert decode.counted("single_flight/miss") == 1
