"""A Forwarder that follows the KV events of stock engines, published by vLLM's own publisher."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockStored,
    KVEventBatch,
)

from dynamo_lite.forward import tokenizer
from dynamo_lite.forward.known_blocks import PromptTokens
from tests.builders import eventually
from tests.forwarding import TEXT, Rig, rig
from tests.kv_publishing import BLOCK, Publisher, publishing
from tests.ports import reserved_port
from tests.scripted import Leg

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")


def tokenize(body: Any) -> list[int]:
    """A token for each character."""
    text = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
    return [ord(letter) for letter in text]


async def until(condition: Callable[[], Any]) -> None:
    await eventually(condition, 20)


def held(r: Rig, text: str) -> dict[int, int]:
    """Tokens of it that each engine is known to hold."""
    return r.known.matched(PromptTokens([ord(letter) for letter in text]))


def asked_of(engine: Any) -> Sequence[Leg]:
    return [leg for leg in engine.legs if leg.route != "/tokenize"]


PROMPT = "x" * 400


async def test_a_prompt_goes_where_its_prefix_is_held():
    """By events from before the Forwarder, and by later ones."""
    with publishing(2) as engines:
        engines[1].publish(engines[1].stored(PROMPT))
        events = [engine.options for engine in engines]
        async with rig(prefill=2, prefill_choice="prefix", events=events) as r:
            r.decode[0].tokenize = tokenize
            await until(lambda: held(r, PROMPT) == {0: 0, 1: 400})
            for _ in range(2):
                assert await r.text(prompt=PROMPT + "y") == TEXT
            engines[0].publish(engines[0].stored("z" * 320))
            await until(lambda: held(r, "z" * 330)[0] == 320)
            for _ in range(2):
                assert await r.text(prompt="z" * 330) == TEXT
            assert [len(asked_of(engine)) for engine in r.prefill] == [2, 2]
            engines[1].publish(engines[1].removed(PROMPT))
            await until(lambda: held(r, PROMPT) == {0: 0, 1: 0})
            engines[0].publish(AllBlocksCleared())
            await until(lambda: held(r, "z" * 330) == {0: 0, 1: 0})


async def test_decode_engines_with_the_prefix_need_no_prefill():
    with publishing(1) as [engine]:
        engine.publish(engine.stored(PROMPT))
        options = {"events": [{}, engine.options], "max_local_prefill_length": 50}
        async with rig(decode_choice="prefix", **options) as r:
            r.decode[0].tokenize = tokenize
            await until(lambda: held(r, PROMPT) == {1: 400})
            await r.text(prompt=PROMPT + "y" * 40)
            await r.text(prompt="y" * 440)
            assert r.answered == {("alone", "cached"): 1, ("disaggregated", ""): 1}


async def test_missing_batches_are_replayed():
    with publishing(1) as [engine]:
        async with rig(events=[engine.options]) as r:
            engine.publish(engine.stored("a" * 64))
            await until(lambda: held(r, "a" * 64) == {0: 64})
            await until(engine.idle)
            engine.lose(engine.stored("b" * 64))
            engine.lose(engine.removed("a" * 64))
            engine.publish(engine.stored("c" * 64))
            await until(lambda: held(r, "c" * 64) == {0: 64})
            assert held(r, "b" * 64) == {0: 64} and held(r, "a" * 64) == {0: 0}
            assert r.known.batches["missing"] == 1


async def test_without_a_replay_a_gap_leaves_what_comes_after_it():
    with publishing(1, replays=False) as [engine]:
        async with rig(events=[engine.options]) as r:
            await until(lambda: _published(engine, r, "a" * 64))
            await until(engine.idle)
            engine.lose(engine.removed("a" * 64))
            engine.publish(engine.stored("c" * 64))
            await until(lambda: held(r, "c" * 64) == {0: 64})
            assert held(r, "a" * 64) == {0: 0}


def _published(engine: Publisher, r: Rig, text: str) -> bool:
    """Repeated until the subscription is there."""
    engine.publish(engine.stored(text))
    return held(r, text) == {0: len(text)}


async def test_an_engine_that_was_restarted_holds_nothing():
    with publishing(1) as [engine]:
        engine.publish(engine.stored(PROMPT))
        async with rig(events=[engine.options]) as r:
            await until(lambda: held(r, PROMPT) == {0: 400})
            engine.stop()
            await until(lambda: held(r, PROMPT) == {})
            engine.start()
            await until(lambda: held(r, PROMPT) == {0: 0})
            engine.publish(engine.stored("a" * 64))
            await until(lambda: held(r, "a" * 64) == {0: 64})


async def test_malformed_frames_are_dropped():
    """What comes after them counts."""
    port = reserved_port()
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.PUB)
    try:
        socket.bind(f"tcp://127.0.0.1:{port}")
        async with rig(events=[{"kv_events": f"tcp://127.0.0.1:{port}"}]) as r:
            block = BlockStored(
                block_hashes=[b"x"],
                parent_block_hash=None,
                token_ids=[ord("a")] * BLOCK,
                block_size=BLOCK,
                lora_id=None,
                medium="GPU",
                lora_name=None,
            )
            good = msgspec.msgpack.encode(KVEventBatch(ts=1.0, events=[block]))

            async def arrives() -> bool:
                """Until the subscription is there nothing does."""
                await socket.send_multipart([b"", b"\0" * 8, good])
                return r.known.batches["applied"] > 0

            await until(arrives)
            rng = random.Random(1)
            for number in range(1, 50):
                junk = rng.randbytes(rng.randrange(60))
                for frames in ([b""], [b"", b"\1"], [b"", junk, junk], [junk] * 5):
                    await socket.send_multipart(frames)
                await socket.send_multipart([b"", number.to_bytes(8, "big"), junk])
            await socket.send_multipart([b"", (1 << 62).to_bytes(8, "big"), good])
            await until(lambda: held(r, "a" * BLOCK) == {0: BLOCK})
            await until(lambda: r.known.batches["malformed"] >= 49)
            assert await r.text() == TEXT
    finally:
        context.destroy(linger=0)


async def test_unknown_tokens_leave_what_was_sent(monkeypatch: pytest.MonkeyPatch):
    """An engine without /tokenize, and one that is late."""
    with publishing(1) as [engine]:
        monkeypatch.setattr(tokenizer, "TIMEOUT_S", 0.1)
        options: dict[str, Any] = {"events": [engine.options]}
        async with rig(prefill=2, prefill_choice="prefix", **options) as r:
            await until(lambda: held(r, PROMPT) == {0: 0})
            for _ in range(3):
                assert await r.text(prompt="q" * 4000) == TEXT
            assert sorted(len(asked_of(one)) for one in r.prefill) == [0, 3]
            assert len([leg for leg in r.decode[0].legs if leg.route == "/tokenize"]) == 1


async def test_short_and_known_prompts_are_not_tokenized_again():
    with publishing(1) as [engine]:
        async with rig(prefill_choice="prefix", events=[engine.options]) as r:
            r.decode[0].tokenize = tokenize
            await until(lambda: held(r, PROMPT) == {0: 0})
            await r.text(prompt="short")
            await r.text(prompt=[1] * 400)
            for _ in range(3):
                await r.text(prompt=PROMPT)
            chat = {"model": "m", "messages": [{"role": "user", "content": PROMPT}], "tools": []}
            await r.ask({**chat, "temperature": 0.1}, route="/v1/chat/completions")
            legs = [leg for leg in r.decode[0].legs if leg.route == "/tokenize"]
            assert [leg.body for leg in legs] == [{"model": "m", "prompt": PROMPT}, chat]


async def test_keys_of_clients_reach_the_tokenizer():
    with publishing(1) as [engine]:
        async with rig(prefill_choice="prefix", events=[engine.options]) as r:
            r.decode[0].tokenize = tokenize
            await until(lambda: held(r, PROMPT) == {0: 0})
            headers = {"authorization": "Bearer k", "x-secret": "s"}
            await r.ask({"model": "m", "prompt": PROMPT, "max_tokens": 4}, headers=headers)
            leg = next(leg for leg in r.decode[0].legs if leg.route == "/tokenize")
            assert leg.headers["authorization"] == "Bearer k" and "x-secret" not in leg.headers
