"""The process of a simulated engine: what it is built from, its steps, and their outputs.

A step computes digests over real blocks and takes virtual time. The component
is another process: it posts commands and receives outputs, and neither waits
for the other.
"""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dynamo_lite.disagg.engine import EngineLoad
from dynamo_lite.disagg.engine_config import DecodeEngineConfig, EngineConfig
from dynamo_lite.disagg.prefill.scheduler import PrefillScheduler
from dynamo_lite.disagg.server_clients import ServerClients
from dynamo_lite.protocol.errors import TransferError
from dynamo_lite.protocol.generate import PrefillCounts, TokenDelta
from dynamo_lite.protocol.records import EngineMetadata, RankMetadata
from dynamo_lite.runtime.claim_cells import Until
from dynamo_lite.runtime.clock import Clock
from tests.simulation.engine.halves import DecodeHalves, PrefillHalves, TaskBridge, rank_clock
from tests.simulation.engine.model import BlockPool, SimKvMemory, SimRequest, SimRequestStatus
from tests.simulation.engine.mover import Fabric, SimMover
from tests.simulation.engine.scheduler import SimScheduler, StepPlan
from tests.simulation.shipped import Shipped


@dataclass(frozen=True, kw_only=True)
class SimModelConfig:
    """Size and speed of a simulated engine; times in (virtual) seconds.

    budget_tokens: computed in one step at most. A step takes step_s and token_s for
    each token; one that has nothing to compute takes poll_s. load_s: the start.
    """

    model: str = "sim"
    block_size: int = 4
    num_blocks: int = 96
    max_model_len: int = 192
    budget_tokens: int = 48
    max_running: int = 8
    step_s: float = 0.004
    token_s: float = 0.0005
    poll_s: float = 0.02
    load_s: float = 0.2


@dataclass
class Outputs:
    """The outputs of one step, from the engine to its component."""

    deltas: list[TokenDelta] = field(default_factory=list[TokenDelta])
    counts: dict[str, Any] = field(default_factory=dict[str, Any])
    load: EngineLoad = field(default_factory=EngineLoad)


#: As in `vllm/engine/opened_rank.py`.
_MOVE = 0.5
#: An incarnation's memory begins at most this many blocks after this address.
_BASE, _SHIFTS = 1 << 20, 4


@dataclass(frozen=True, kw_only=True)
class EngineSetup:
    """What one incarnation of an engine is made from.

    clients: the engine process's own. until: until when a prefill engine's claims hold. address:
    its host on the fabric.
    """

    config: SimModelConfig
    engine_config: EngineConfig
    clients: ServerClients
    fabric: Fabric
    address: str
    clock: Clock
    rng: random.Random
    until: Until = lambda cell: 0.0


class SimEngineProcess:
    """The inside of an engine's process, for its component's pipe and for the invariants.

    deliver: takes the outputs.
    """

    def __init__(self, parts: Shipped, setup: EngineSetup, deliver: Callable[[Outputs], None]):
        config = setup.config
        decodes = isinstance(setup.engine_config.role, DecodeEngineConfig)
        shift = setup.rng.randrange(_SHIFTS) * config.block_size * 8
        self.setup, self._parts, self._deliver = setup, parts, deliver
        self._clock = setup.clock
        self.memory = SimKvMemory(
            config.num_blocks, config.block_size, _BASE + shift, dense=decodes
        )
        self.mover = SimMover(
            setup.fabric, setup.engine_config.engine_id, setup.address, self.memory
        )
        self.pool = BlockPool(config.num_blocks)
        self.metadata = _metadata(setup, self.mover)
        self.halves = self._decode_halves() if decodes else self._prefill_halves()
        self.halves.scheduler.metadata = self.metadata
        self.scheduler = SimScheduler(
            self.pool,
            config.block_size,
            self.halves,
            budget_tokens=config.budget_tokens,
            max_running=config.max_running,
        )
        self.ready = False
        self._gave_tokens = False
        #: The load that was reported last.
        self._told = EngineLoad()
        #: Called after each step with the time at which it was scheduled.
        self.on_step: Callable[[float], None] = lambda scheduled_at: None
        #: Called with the ids of requests that are about to be aborted, and how long each of them
        #: has waited for the end of a step.
        self.on_abort: Callable[[Mapping[str, float]], None] = lambda waited_s: None
        #: Called when it ends because a write was in flight for too long.
        self.on_late_write: Callable[[], None] = lambda: None
        self._added: list[SimRequest] = []
        #: When that was asked for.
        self._aborted: dict[str, float] = {}
        self._posted = asyncio.Event()
        self._stopping = False

    def _decode_halves(self) -> DecodeHalves:
        setup, parts = self.setup, self._parts
        scheduler = parts.decode_scheduler(
            setup.engine_config,
            setup.config.block_size,
            self.pool,
            clients=setup.clients,
            open_bridge=TaskBridge,
            cache=lambda request, tokens: self.scheduler.cache(request, tokens),
            clock=setup.clock,
            ledger=parts.ledger(landing_s=setup.engine_config.lease_ttl_s),
            new_attempt=lambda: f"{setup.rng.getrandbits(64):016x}",
            hash_block_size=setup.config.block_size,
        )
        rank = parts.decode_rank(self.mover, self.metadata.ranks[0])
        return DecodeHalves(scheduler, rank, setup.config.block_size)

    def _prefill_halves(self) -> PrefillHalves:
        setup = self.setup
        scheduler = PrefillScheduler(
            setup.engine_config,
            setup.config.block_size,
            self.pool,
            lambda job, tokens: [self.scheduler.requests[job].block_ids],
            clients=setup.clients,
            open_bridge=TaskBridge,
            clock=setup.clock,
        )
        rank = self._parts.prefill_rank(
            self.mover,
            self.metadata.ranks[0],
            0,
            setup.until,
            rank_clock(setup.clock),
            move_s=_MOVE * setup.engine_config.lease_ttl_s,
        )
        return PrefillHalves(scheduler, rank, self.mover)

    def holds(self, attempt: str) -> bool:
        """Whether the claim holds under which it writes and reads this attempt."""
        cell = self.mover.cells.get(attempt)
        return cell is not None and self._clock.boottime() < self.setup.until(cell)

    # Commands of the component

    def add(self, request: SimRequest) -> None:
        self._added.append(request)
        self._posted.set()

    def abort(self, request_ids: Sequence[str]) -> None:
        self._aborted |= dict.fromkeys(request_ids, self._clock.monotonic())
        self._posted.set()

    def stop(self) -> None:
        """`main` ends after the step that is being computed."""
        self._stopping = True
        self._posted.set()

    # The engine's own process

    async def main(self, on_ready: Callable[[], None]) -> None:
        """The process: loads, then runs until it is stopped."""
        await asyncio.sleep(self.setup.config.load_s)
        try:
            async with self.halves.running():
                self.ready = True
                on_ready()
                await self._run()
        except TransferError:
            # As in vLLM, where an exception of a rank ends the engine's processes.
            self.on_late_write()
        finally:
            self.halves.rank.close()

    async def _run(self) -> None:
        while not self._stopping:
            self._apply_commands()
            if self.scheduler.has_work:
                await self._step()
            else:
                self._tell_load()
                self._posted.clear()
                await self._posted.wait()

    def _apply_commands(self) -> None:
        added, self._added = self._added, []
        for request in added:
            self.scheduler.add(request)
        aborted, self._aborted = self._aborted, {}
        if aborted:
            now = self._clock.monotonic()
            self.on_abort({request_id: now - at for request_id, at in aborted.items()})
            self.scheduler.abort(list(aborted))

    async def _step(self) -> None:
        config = self.setup.config
        scheduled_at = self._clock.monotonic()
        plan = self.scheduler.schedule(scheduled_at)
        self.halves.before_forward(plan.step)
        tokens = plan.tokens
        await asyncio.sleep(config.step_s + tokens * config.token_s if tokens else config.poll_s)
        outputs = self._forward(plan)
        results, report = self.halves.after_forward(plan.step)
        self._end_generated(plan)
        self.scheduler.apply_results(results, report)
        outputs.counts = self.halves.take_counts()
        self.on_step(scheduled_at)
        self._gave_tokens = self._gave_tokens or bool(outputs.deltas)
        if outputs.deltas or outputs.counts:
            outputs.load = self._told = self._load()
            self._deliver(outputs)

    def _load(self) -> EngineLoad:
        return EngineLoad(
            running=self.scheduler.running,
            waiting=self.scheduler.waiting,
            kv_usage=1 - self.pool.get_num_free_blocks() / max(1, self.pool.num_gpu_blocks - 1),
            gave_tokens=self._gave_tokens,
            max_running=self.setup.config.max_running,
        )

    def _tell_load(self) -> None:
        """As vLLM does after the last request was aborted."""
        if (load := self._load()) != self._told:
            self._told = load
            self._deliver(Outputs(load=load))

    def _forward(self, plan: StepPlan) -> Outputs:
        """First the KV of all requests: prompts of one step may share blocks. Then the tokens."""
        computed = [
            (self.scheduler.requests[request_id], count)
            for request_id, count in plan.num_scheduled_tokens.items()
        ]
        for request, count in computed:
            end = request.num_computed_tokens
            self.memory.fill(request.block_ids, end - count, request.states[end - count : end])
        outputs = Outputs()
        for request, _ in computed:
            if request.num_computed_tokens == request.num_tokens:
                outputs.deltas.append(self._sample(request))
        return outputs

    def _sample(self, request: SimRequest) -> TokenDelta:
        first = not request.output_token_ids
        kv = self.memory.read(request.block_ids, request.num_tokens)
        request.take(token := request.sampler.draw(kv))
        counts = PrefillCounts(
            request.num_prompt_tokens,
            request.cached_tokens,
            request.external_tokens,
            request.waited_s,
            self._clock.monotonic() - request.arrived,
        )
        return TokenDelta(
            request_id=request.request_id,
            token_ids=[token],
            finish_reason=request.finish_reason,
            prefill=counts if first else None,
        )

    def _end_generated(self, plan: StepPlan) -> None:
        for request_id in plan.num_scheduled_tokens:
            request = self.scheduler.requests.get(request_id)
            if request is None or request.status is not SimRequestStatus.RUNNING:
                continue
            if request.finish_reason is not None:
                self.scheduler.finish(request)


def _metadata(setup: EngineSetup, mover: SimMover) -> EngineMetadata:
    config = setup.config
    rank = RankMetadata(
        agent=mover.metadata(), memory="DRAM", device=0, regions=mover.memory.regions()
    )
    return EngineMetadata(
        engine_id=setup.engine_config.engine_id,
        lease_id=setup.engine_config.lease_id,
        fingerprint={"model": config.model, "block_size": str(config.block_size)},
        block_size_tokens=config.block_size,
        num_blocks=config.num_blocks,
        ranks=(rank,),
    )
