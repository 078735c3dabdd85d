"""Real engines on hosts: KV goes over the network that is cut, while clients stream."""

import asyncio
import itertools
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

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
from tests.chaos.meters import Meters
from tests.hosts.rig import API_KEY, NAMESPACE, VLLM, VLLM_CONFIG, Rig
from tests.vllm.asking import prompt_ids
from tests.vllm.graph import PlainServer

#: How long until all is in order again, on a machine that is busy with other things.
AGAIN_S = 240.0
_LOOK_S = 0.5
#: Of each Frontend: so engines have prompts and answers in one step.
_CLIENTS = 2
_TOKENS = 24
#: Answers that the clients of each Frontend get before and after a cut.
_FEW = 4
Say = Callable[[str], None]
#: Longest time to a whole answer, with a cut that has to be noticed first.
_ANSWER_S = 120.0
#: Decisions that are read of each engine.
_LAST = 50


@dataclass
class Streams:
    """Some clients of each Frontend, who ask at the same time.

    clients: one for all of a Frontend. prompts: an odd number, so that two workers that take turns
    get all of them. right: the answer to each of one plain vLLM server.
    """

    clients: list[AsyncOpenAI]
    prompts: Sequence[list[int]]
    right: Sequence[str]
    #: Of each Frontend.
    ended: list[int] = field(init=False)
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ended = [0] * len(self.clients)

    async def keep_asking(self, number: int, first: int) -> None:
        """As a client of the Frontend of this number. first: the prompt that it begins with."""
        asked = list(zip(self.prompts, self.right, strict=True))
        while True:
            for prompt, right in asked[first:] + asked[:first]:
                try:
                    async with asyncio.timeout(_ANSWER_S):
                        said = await ask(self.clients[number], prompt)
                except Exception as exc:
                    self.wrong.append(f"client {number}, {len(prompt)} tokens: {exc!r}")
                else:
                    self.ended[number] += 1
                    if said != right:
                        self.wrong.append(f"{len(prompt)} tokens: {said!r} instead of {right!r}")

    @contextmanager
    def elsewhere(self, number: int) -> Iterator[None]:
        """The clients of this number ask another Frontend meanwhile, from their next questions."""
        own = self.clients[number]
        self.clients[number] = self.clients[number - 1]
        try:
            yield
        finally:
            self.clients[number] = own

    async def more(self, answers: int) -> None:
        """Returns when every Frontend has given so many more. Raises TimeoutError."""
        wanted = [ended + answers for ended in self.ended]
        await eventually(
            lambda: all(have >= want for have, want in zip(self.ended, wanted, strict=True)),
            AGAIN_S,
        )


class Writes:
    """What the workers have counted of late writes since this was made.

    A write that the fence refuses, and a notice for an attempt that is over, are the safeties at
    work. KV that is not what its writer sent, and a commit without the attempt's grant, are not:
    somebody else has written.
    """

    _WRONG = ("commit_mismatches", 'dropped_messages{where="ungranted"}')

    def __init__(self, meters: Meters):
        self._meters, self._before = meters, meters.totals()

    def __str__(self) -> str:
        fenced, late = self._count("fenced_writes"), self._count("late_notices")
        return f"{fenced} writes refused by the fence, {late} late notices"

    def trouble(self) -> list[str]:
        found = {name: self._count(name) for name in self._WRONG}
        return [f"{name}: {count}" for name, count in found.items() if count]

    def _count(self, sample: str) -> int:
        return int(self._meters.totals()[sample] - self._before[sample])


async def ask(client: AsyncOpenAI, prompt: list[int]) -> str:
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

    await eventually(still, AGAIN_S)
    return free.pop()


async def remote_prefills(rig: Rig, within_s: float) -> list[int]:
    """How many prompts of each decode engine were prefilled remotely of late. Raises
    DynamoLiteError."""
    asked = encode(Explain(last=_LAST, within_s=within_s))
    found: list[int] = []
    async with open_messaging(rig.nats.url, rig.directory / "secret") as messaging:
        for engine in await engines(rig):
            subject = names.explain_subject(NAMESPACE, engine.metadata.engine_id)
            said = decode_explained(await messaging.request(subject, asked, timeout_s=5.0))
            outcomes = [one.asked.outcome for one in said.decisions if one.asked is not None]
            found.append(outcomes.count("committed"))
    return found


async def in_order(rig: Rig, streams: Streams) -> None:
    """Returns when every process is a member, every Frontend gives answers and every decode engine
    gets prompts from prefill workers. Raises TimeoutError, AssertionError."""
    await rig.whole()
    await asyncio.gather(streams.more(_FEW), prefilled_remotely(rig))


async def prefilled_remotely(rig: Rig) -> None:
    """Returns when every decode engine has got a prompt from a prefill worker since then. Raises
    TimeoutError."""
    began = time.monotonic()

    async def all_remote() -> bool:
        await asyncio.sleep(_LOOK_S)
        try:
            found = await remote_prefills(rig, time.monotonic() - began)
        except DynamoLiteError:
            return False
        return len(found) == len(rig.services["VllmWorker"]) and all(found)

    await eventually(all_remote, AGAIN_S)


#: What happens to the rig while the clients go on; at its end all is mended.
Scenario = Callable[[Rig, Streams], Awaitable[None]]


def questions() -> list[list[int]]:
    return [prompt_ids(length, seed=length) for length in (40, 400, 900, 1500, 700)]


async def plain_answers(directory: Path) -> list[str]:
    """What one plain vLLM server answers, before the hosts are made."""
    with PlainServer(directory / "plain", (VLLM.graph, VLLM_CONFIG)) as plain:
        url = await asyncio.to_thread(lambda: plain.url)
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            return [await ask(client, prompt) for prompt in questions()]


async def play_all(rig: Rig, right: Sequence[str], wanted: Mapping[str, Scenario], say: Say) -> int:
    """These scenarios under load, by name. right: see `Streams`. Returns after how many something
    was wrong."""
    failed = 0
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(
                AsyncOpenAI(base_url=f"{url}/v1", api_key=API_KEY, max_retries=0)
            )
            for url in rig.frontends
        ]
        streams = Streams(clients, questions(), right)
        meters = await stack.enter_async_context(Meters(rig.processes))
        free_blocks = await at_rest(rig)
        for name, scenario in {"nothing": _nothing, **wanted}.items():
            streams.wrong.clear()
            began, writes = time.monotonic(), Writes(meters)
            trouble = await _play(rig, streams, scenario, free_blocks)
            await meters.ask()
            trouble += writes.trouble()
            failed += bool(trouble)
            answers = " and ".join(map(str, streams.ended))
            verdict = "; ".join(trouble or ["right"])
            seconds = time.monotonic() - began
            say(f"{name:36} {seconds:6.1f} s  {verdict}, {answers} answers so far, {writes}")
    return failed


async def _nothing(rig: Rig, streams: Streams) -> None:
    """Afterwards all is in order, as after each scenario."""


async def _play(rig: Rig, streams: Streams, scenario: Scenario, free_blocks: int) -> list[str]:
    try:
        async with AsyncExitStack() as stack:
            for number, first in itertools.product(range(len(streams.clients)), range(_CLIENTS)):
                asking = streams.keep_asking(number, first)
                client = running(asking, name=f"client {number}-{first}")
                await stack.enter_async_context(client)
            await streams.more(1)
            await scenario(rig, streams)
            await in_order(rig, streams)
        await at_rest(rig, free_blocks)
    except (AssertionError, TimeoutError) as exc:
        return [f"no answers, no remote prefills, or blocks are missing: {exc}", *streams.wrong]
    return streams.wrong
