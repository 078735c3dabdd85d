"""The two sides of a decode engine's scheduler half, without an engine or a network.

The engine is a block pool that counts references; what goes to the bridge is run
by the test, over the queue's and the messaging's in-process twins.
"""

import uuid
from collections.abc import Callable, Coroutine, Sequence
from types import SimpleNamespace
from typing import Any

from dynamo_lite.disagg.attempts.ledger import CLAIM_S, Ledger
from dynamo_lite.disagg.decode.queue_watch import QueueView
from dynamo_lite.disagg.decode.scheduler import CacheBlocks, DecodeScheduler
from dynamo_lite.disagg.engine_config import DecodeEngineConfig
from dynamo_lite.disagg.messages import DecodeStep, RankResults
from dynamo_lite.disagg.queue.base import QueueConfig
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.health import EngineStatus, decode_engine_status
from dynamo_lite.protocol.options import DisaggOptions
from dynamo_lite.protocol.prefill import (
    Claim,
    ClaimRefused,
    Done,
    Held,
    RemotePrefillRequest,
    decode_claim_reply,
    decode_job,
)
from tests.builders import CLAIM, ManualClock, engine_config
from tests.twins.queue import MemoryBroker, MemoryQueue
from tests.twins.servers import MemoryMessaging

WRITER = 0xA
BLOCK, POOL = 4, 256
HELD = Held(for_s=CLAIM_S)
LIMIT, QUEUE_SIZE, TIMEOUT_S, TTL_S, DEPTH = 4, 5, 20.0, 10.0, 64


class Bridge:
    """Keeps what is to be called until the test calls it."""

    def __init__(self, _session: Any):
        self.calls: list[Callable[[], Coroutine[Any, Any, None] | None]] = []

    def start(self, timeout_s: float) -> None: ...

    def close(self) -> None: ...

    def call(self, callback: Callable[[], None]) -> None:
        self.calls.append(callback)


class Clients:
    """The servers that a session connects to: those that a test puts here before it opens one."""

    def __init__(self) -> None:
        self.servers: Any = None

    def messaging(self) -> Any:
        return self.servers.messaging()

    def store(self) -> Any:
        return self.servers.store()

    def queue(self, config: QueueConfig) -> Any:
        return self.servers.queue(config)


class FakePool:
    """vLLM's block pool, as far as it is used: blocks with reference counts."""

    num_gpu_blocks = POOL

    def __init__(self) -> None:
        self.blocks = [SimpleNamespace(block_id=i, ref_cnt=0, is_null=False) for i in range(POOL)]

    def touch(self, blocks: Sequence[Any]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: Any) -> None:
        for block in blocks:
            assert block.ref_cnt > 0
            block.ref_cnt -= 1

    def get_num_free_blocks(self) -> int:
        return sum(block.ref_cnt == 0 for block in self.blocks)

    @property
    def used(self) -> int:
        return POOL - self.get_num_free_blocks()


def prompt(request_id: str, tokens: int, **fields: Any) -> Any:
    defaults: dict[str, Any] = {
        "request_id": request_id,
        "prompt_token_ids": list(range(100, 100 + tokens)),
        "num_prompt_tokens": tokens,
        "skip_reading_prefix_cache": False,
        "mm_features": [],
        "lora_request": None,
        "prompt_embeds": None,
        "block_hashes": [f"{request_id}/{i}" for i in range(tokens // BLOCK)],
        "priority": 0,
        "cache_salt": None,
        "kv_transfer_params": None,
        "trace_headers": None,
    }
    return SimpleNamespace(**{**defaults, **fields})


class Writers:
    """Who is registered, and what ails them: the workers, their roster and their monitor in one."""

    def __init__(self) -> None:
        self.members: tuple[int, ...] = (WRITER,)
        self.ails: dict[int, str] = {}
        self.alive: list[int] = []
        self.roster = self.health = self

    @property
    def usable(self) -> tuple[Any, ...]:
        return tuple(SimpleNamespace(lease_id=w) for w in self.members if w not in self.ails)

    responsive = usable

    def trouble(self, writer: int) -> str:
        return self.ails.get(writer, "" if writer in self.members else "it is not registered")

    def shows_life(self, writer: int) -> None:
        self.alive.append(writer)


class Decode:
    """A decode engine: its scheduler half, its pool, and the network that it sees."""

    def __init__(
        self,
        clock: ManualClock,
        max_local: int = LIMIT,
        *,
        hash_block_size: int | None = BLOCK,
        overlapping_steps: int = 1,
        cache: CacheBlocks | None = None,
    ):
        self.clock, self.pool, self.taken = clock, FakePool(), {}
        self.broker, self.messaging = MemoryBroker(), MemoryMessaging()
        self.queue_config = QueueConfig(max_jobs=DEPTH)
        self.queue = MemoryQueue(
            self.broker, stream="s", subject="s.jobs", config=self.queue_config
        )
        self.clients, self.ledger = Clients(), Ledger(landing_s=TTL_S)
        self.new_attempt: Callable[[], str] = lambda: uuid.uuid4().hex
        role = DecodeEngineConfig(
            options=DisaggOptions(
                max_local_prefill_length=max_local,
                max_prefill_queue_size=QUEUE_SIZE,
                remote_prefill_timeout_s=TIMEOUT_S,
                queue_view_max_age_s=2.0,
                max_queue_wait_s=1e6,
            ),
            prefill_component="PrefillWorker",
            queue=self.queue_config,
        )
        self.half = DecodeScheduler(
            engine_config(role, lease_ttl_s=TTL_S),
            BLOCK,
            self.pool,
            clients=self.clients,
            open_bridge=Bridge,
            clock=clock,  # type: ignore[arg-type]
            ledger=self.ledger,
            new_attempt=lambda: self.new_attempt(),
            hash_block_size=hash_block_size,
            overlapping_steps=overlapping_steps,
            cache=cache,
        )
        self.bridge: Any = self.half.bridge
        self.net: Any = self.half._net
        self.attempts: Any = self.net.attempts
        self.use(self.queue)
        self.workers, self.writers = self.net.workers, Writers()
        self.net.workers = self.attempts._workers = self.writers
        self.sees()

    def use(self, queue: Any) -> None:
        """The engine's jobs go to this queue from now on."""
        self.queue = self.attempts._queue = queue
        # Run by `network`, and no timers.
        self.attempts._start = lambda coro, _about: self.bridge.calls.append(lambda: coro)

    def pass_s(self, seconds: float) -> None:
        """Time passes, and the ledger sees it."""
        self.clock.now += seconds
        self.attempts._on_time()

    def sees(self, jobs: int = 0, *, tokens: int = 0) -> None:
        """The bridge reads the queue."""
        self.net.queue_watch.view = QueueView(jobs, tokens, self.clock.now)

    def admit(self, request: Any, cached: int = 0) -> int:
        """vLLM's scheduler takes a waiting request. Returns its external tokens."""
        external, waits = self.half.num_new_matched_tokens(request, cached)
        assert waits == (external > 0)
        count = -(-request.num_prompt_tokens // BLOCK)
        blocks = [b for b in self.pool.blocks if b.ref_cnt == 0][:count]
        self.pool.touch(blocks)
        self.taken[request.request_id] = blocks
        ids = [block.block_id for block in blocks]
        self.half.state_after_alloc(request, [ids], external)
        return external

    def finish(self, request_id: str) -> None:
        """vLLM ends a request: it asks the connector, then frees the blocks."""
        self.half.request_finished(request_id)
        self.pool.free_blocks(self.taken.pop(request_id))

    async def step(self) -> DecodeStep:
        """A step, what the bridge does then, and the step that takes it."""
        self.half.build_step()
        await self.network()
        return self.half.build_step()

    def finish_last(self, request_id: str) -> None:
        """Nothing is left of any request."""
        self.finish(request_id)
        self.assert_clean()

    def output(self, *received: str, failed: Sequence[str] = ()) -> None:
        self.half.worker_output(RankResults(received=set(received), lost=set(failed)))

    async def network(self) -> None:
        """Runs what the scheduler half has submitted."""
        while self.bridge.calls:
            if (work := self.bridge.calls.pop(0)()) is not None:
                await work

    async def job(self) -> RemotePrefillRequest:
        """The next job on the queue, with what the scheduler submitted run first."""
        await self.network()
        job = await self.queue.pull(timeout_s=0)
        assert job is not None
        return decode_job(job.payload)

    async def job_of_step(self) -> RemotePrefillRequest:
        self.half.build_step()
        return await self.job()

    async def ask(self, request_id: str = "r1", tokens: int = 10, *, claimed: bool = False) -> str:
        """A remote prefill under way. Returns its attempt; its step is over."""
        assert self.admit(prompt(request_id, tokens)) > 0
        [attempt] = self.half.build_step().expect
        await self.network()
        if claimed:
            assert await self.claim(attempt) == HELD
        return attempt

    async def claim(
        self, attempt: str, writer: int = WRITER, claim: int = CLAIM
    ) -> Held | ClaimRefused:
        asked = Claim(attempt=attempt, claim=claim, writer_lease_id=writer)
        return decode_claim_reply(await self.attempts.on_claim(encode(asked)))

    async def done(
        self,
        attempt: str,
        outcome: Any = "written",
        claim: int = CLAIM,
        **more: Any,
    ) -> None:
        done = Done(attempt=attempt, claim=claim, outcome=outcome, **more)
        await self.attempts.on_done(encode(done))

    def attempt_of(self, request_id: str) -> str:
        """The last attempt of a request."""
        return self.half.prefills.by_request[request_id].attempt

    def tune(self, **values: Any) -> None:
        """These live options of the engine's component are set now, and no others."""
        self.net._on_options({name.replace("_", "-"): value for name, value in values.items()})

    async def describe(self) -> EngineStatus | None:
        reply = await self.net._on_describe(b"")
        return None if reply is None else decode_engine_status(reply)

    def counted(self, name: str) -> float:
        return self.half.stats.data.get(name, 0)

    def assert_clean(self) -> None:
        assert not self.half.prefills
        assert repr(self.ledger) == "<Ledger empty>" and self.ledger.waiting == 0
        assert not self.half.busy
        assert self.pool.used == 0
