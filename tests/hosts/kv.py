"""Real engines on hosts: KV goes over the network that is cut, while clients stream."""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, AsyncExitStack
from dataclasses import dataclass, field

from openai import AsyncOpenAI

from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.decisions import Explain, decode_explained
from dynamo_lite.protocol.errors import DynamoLiteError
from dynamo_lite.protocol.prefill import EngineStatus, decode_engine_status
from dynamo_lite.protocol.records import decode_engine
from dynamo_lite.runtime.etcd.store import EtcdStore
from dynamo_lite.runtime.nats.open import open_messaging
from dynamo_lite.runtime.tasks import running
from tests.builders import eventually
from tests.hosts.rig import NAMESPACE, Rig
from tests.vllm.asking import prompt_ids

#: Longer than a lease, with the time until its end is noticed.
_PARTED_S = 20.0
_AGAIN_S = 240.0
_TOKENS = 24
#: Decisions that are read of each engine.
_LAST = 50


@dataclass
class Streams:
    """One client of each Frontend. right: each prompt's answer while nothing was wrong."""

    clients: Sequence[AsyncOpenAI]
    prompts: Sequence[list[int]]
    right: list[str] = field(default_factory=list)
    ended: int = 0
    wrong: list[str] = field(default_factory=list)

    async def learn(self) -> None:
        """Raises AssertionError if a decode worker answers otherwise than another."""
        self.right = [await self._ask(self.clients[0], prompt) for prompt in self.prompts]
        for client in (*self.clients, *self.clients):
            again = [await self._ask(client, prompt) for prompt in self.prompts]
            assert again == self.right, "the answers differ before anything was cut"

    async def keep_asking(self, client: AsyncOpenAI) -> None:
        while True:
            for prompt, right in zip(self.prompts, self.right, strict=True):
                try:
                    said = await self._ask(client, prompt)
                except Exception as exc:
                    self.wrong.append(f"{len(prompt)} tokens: {exc!r}")
                else:
                    self.ended += 1
                    if said != right:
                        self.wrong.append(f"{len(prompt)} tokens: {said!r} instead of {right!r}")

    async def more(self, number: int) -> None:
        before = self.ended
        await eventually(lambda: self.ended >= before + number, _AGAIN_S)

    async def _ask(self, client: AsyncOpenAI, prompt: list[int]) -> str:
        """With a salt of its own, so that no engine knows the prompt."""
        stream = await client.completions.create(
            model="tiny",
            prompt=prompt,
            max_tokens=_TOKENS,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True, "cache_salt": secrets.token_hex(4)},
        )
        return "".join([piece.choices[0].text async for piece in stream if piece.choices])


async def engines(rig: Rig) -> list[EngineStatus]:
    """What the decode engines say of themselves. Raises DynamoLiteError."""
    async with EtcdStore(rig.etcd.url) as store:
        found = await store.get_prefix(names.nixl_metadata_prefix(NAMESPACE))
    async with open_messaging(rig.nats.url, rig.directory / "secret") as messaging:
        return [
            decode_engine_status(
                await messaging.request(
                    names.describe_subject(NAMESPACE, decode_engine(value).engine_id),
                    b"",
                    timeout_s=5.0,
                )
            )
            for value in found.values()
        ]


async def at_rest(rig: Rig, free_blocks: int | None = None) -> int:
    """Returns the free blocks of each decode engine when nothing is under way, all have the same,
    and as many are free as asked for."""
    free: set[int] = set()

    async def still() -> bool:
        try:
            found = await engines(rig)
        except DynamoLiteError:
            return False
        free.clear()
        free.update(engine.free_blocks for engine in found)
        busy = any(engine.quarantined or engine.waiting for engine in found)
        whole = len(found) == len(rig.services["VllmWorker"]) and len(free) == 1
        return whole and not busy and (free_blocks is None or free == {free_blocks})

    await eventually(still, _AGAIN_S)
    return free.pop()


async def remote_prefills(rig: Rig) -> int:
    """How many of the last prompts of each decode engine were prefilled remotely. Raises
    DynamoLiteError."""
    asked, found = Explain(last=_LAST), 0
    async with open_messaging(rig.nats.url, rig.directory / "secret") as messaging:
        for engine in await engines(rig):
            subject = names.explain_subject(NAMESPACE, engine.metadata.engine_id)
            said = decode_explained(await messaging.request(subject, encode(asked), timeout_s=5.0))
            found += sum(
                decision.asked is not None and decision.asked.outcome == "committed"
                for decision in said.decisions
            )
    return found


def cuts(rig: Rig) -> dict[str, Callable[[], AbstractContextManager[None]]]:
    """Between decode and prefill workers, and between workers and the servers: of one worker, the
    others go on, or of all."""
    decode = [program.host for program in rig.services["VllmWorker"]]
    prefill = [program.host for program in rig.services["PrefillWorker"]]
    return {
        "one-decode-parted-from-one-prefill": lambda: rig.parted(decode[:1], prefill[:1]),
        "decode-parted-from-prefill": lambda: rig.parted(decode, prefill),
        "decode-hears-no-prefill": lambda: rig.deaf(decode, prefill),
        "prefill-hears-no-decode": lambda: rig.deaf(prefill, decode),
        "prefill-parted-from-servers": lambda: rig.parted(prefill, rig.server_hosts),
        "prefill-host-vanishes": lambda: rig.unplugged(prefill[0]),
        "decode-host-vanishes": lambda: rig.unplugged(decode[0]),
    }


async def play_all(rig: Rig, say: Callable[[str], None]) -> int:
    """Every cut under load. Returns after how many something was wrong."""
    failed = 0
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(
                AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
            )
            for url in rig.frontends
        ]
        prompts = [prompt_ids(length, seed=length) for length in (40, 400, 900, 1500)]
        streams = Streams(clients, prompts)
        await streams.learn()
        free_blocks = await at_rest(rig)
        remote = await remote_prefills(rig)
        say(f"{remote} remote prefills before the first cut")
        if not remote:
            return 1
        for name, cut in cuts(rig).items():
            streams.wrong.clear()
            trouble = await _play(rig, streams, cut, free_blocks)
            failed += bool(trouble)
            say(f"{name:36} {streams.ended} answers; " + ("; ".join(trouble) or "right"))
    return failed


async def _play(
    rig: Rig,
    streams: Streams,
    cut: Callable[[], AbstractContextManager[None]],
    free_blocks: int,
) -> list[str]:
    try:
        async with AsyncExitStack() as stack:
            for client in streams.clients:
                asking = running(streams.keep_asking(client), name="a client")
                await stack.enter_async_context(asking)
            await streams.more(4)
            with cut():
                await asyncio.sleep(_PARTED_S)
                await streams.more(4)
            await streams.more(4)
        await at_rest(rig, free_blocks)
    except TimeoutError:
        return ["no answers, or blocks are missing", *streams.wrong]
    return streams.wrong
