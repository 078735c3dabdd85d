"""Builds a simulated engine's process: pool, memory, mover, halves, core."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry

from dynamo_lite.disagg.decode.first_tokens import FirstTokens
from dynamo_lite.disagg.decode.rank import DecodeRank
from dynamo_lite.disagg.decode.resume import CacheBlocks
from dynamo_lite.disagg.decode.scheduler import DecodeScheduler
from dynamo_lite.disagg.engine_config import (
    DecodeEngineConfig,
    EngineConfig,
    PrefillEngineConfig,
)
from dynamo_lite.disagg.prefill.rank import PrefillRank
from dynamo_lite.disagg.prefill.running_job import BlockIds
from dynamo_lite.disagg.prefill.scheduler import PrefillScheduler
from dynamo_lite.disagg.server_clients import ServerClients
from dynamo_lite.policy.attempts.ledger import Ledger
from dynamo_lite.protocol.records import EngineMetadata, RankMetadata
from dynamo_lite.runtime.clock import Clock
from dynamo_lite.runtime.permits import Permit, PermitVerdict, always_granted, no_grant
from tests.simulation.engine.core import Outputs, SimCore, SimModelConfig
from tests.simulation.engine.halves import (
    DecodeHalves,
    PrefillHalves,
    TaskBridge,
    rank_clock,
    watch,
)
from tests.simulation.engine.memory import SimKvMemory
from tests.simulation.engine.mover import Fabric, SimMover
from tests.simulation.engine.pool import BlockPool
from tests.simulation.engine.request import SimRequest

#: An incarnation's memory begins at most this many blocks after this address.
_BASE, _SHIFTS = 1 << 20, 4


@dataclass(frozen=True, kw_only=True)
class EngineSetup:
    """What one incarnation of an engine is made from.

    clients: the engine process's own. alive, verdict, grant_of: a prefill engine's fence,
    the verdicts on its permits, and their grants. address: its host on the fabric.
    """

    config: SimModelConfig
    engine_config: EngineConfig
    clients: ServerClients
    fabric: Fabric
    address: str
    clock: Clock
    rng: random.Random
    alive: Callable[[], bool] = lambda: True
    verdict: Callable[[Permit], PermitVerdict] = always_granted
    grant_of: Callable[[Permit], int] = no_grant


@dataclass
class SimEngineProcess:
    """The inside of an engine's process, for its component's pipe and for the invariants."""

    setup: EngineSetup
    core: SimCore
    halves: DecodeHalves | PrefillHalves
    mover: SimMover
    metadata: EngineMetadata
    ready: bool = False

    async def main(self, on_ready: Callable[[], None]) -> None:
        """The process: loads, then runs until the core is stopped."""
        await asyncio.sleep(self.setup.config.load_s)
        try:
            async with self.halves.running():
                self.ready = True
                on_ready()
                await self.core.run()
        finally:
            self.halves.rank.close()


class Assembly:
    """Makes engines of shipped parts. Mutants override its methods."""

    def build(self, setup: EngineSetup, deliver: Callable[[Outputs], None]) -> SimEngineProcess:
        config, rng = setup.config, setup.rng
        decodes = isinstance(setup.engine_config.role, DecodeEngineConfig)
        shift = rng.randrange(_SHIFTS) * config.block_size * 8
        memory = SimKvMemory(config.num_blocks, config.block_size, _BASE + shift, dense=decodes)
        mover = SimMover(setup.fabric, setup.engine_config.engine_id, setup.address, memory)
        pool = BlockPool(config.num_blocks)
        metadata = self._metadata(setup, mover)

        # The halves call these when the core runs.
        def cache(request: SimRequest, tokens: int) -> None:
            core.scheduler.cache(request, tokens)

        def block_ids(job: str) -> list[int]:
            return core.scheduler.requests[job].block_ids

        if decodes:
            halves = self.decode_halves(setup, pool, cache, mover, metadata)
        else:
            halves = self.prefill_halves(setup, pool, block_ids, mover, metadata)
        core = SimCore(config, pool, memory, halves, clock=setup.clock, deliver=deliver)
        return SimEngineProcess(setup, core, halves, mover, metadata)

    def decode_halves(
        self,
        setup: EngineSetup,
        pool: BlockPool,
        cache: CacheBlocks,
        mover: SimMover,
        metadata: EngineMetadata,
    ) -> DecodeHalves:
        bridges: list[TaskBridge] = []
        grants = random.Random(f"grants/{setup.engine_config.engine_id}")

        def open_bridge(session: Any) -> TaskBridge:
            bridges.append(TaskBridge(session))
            return bridges[0]

        scheduler = self.decode_scheduler(
            setup.engine_config,
            setup.config.block_size,
            pool,
            clients=setup.clients,
            open_bridge=open_bridge,
            cache=cache,
            clock=setup.clock,
            ledger=self.ledger(setup),
            new_attempt=lambda: f"{setup.rng.getrandbits(64):016x}",
            new_grant=lambda: grants.getrandbits(63) or 1,
            hash_block_size=setup.config.block_size,
        )
        scheduler.metadata = metadata
        return DecodeHalves(
            scheduler,
            self.decode_rank(mover, metadata.ranks[0]),
            bridges[0],
            setup.config.block_size,
        )

    decode_rank: type[DecodeRank] = DecodeRank

    def first_tokens(self, setup: EngineSetup) -> FirstTokens:
        """Of an engine's component."""
        return FirstTokens(CollectorRegistry(), setup.clock)

    #: Makes a decode engine's scheduler half.
    decode_scheduler: type[DecodeScheduler] = DecodeScheduler

    def ledger(self, setup: EngineSetup) -> Ledger:
        return Ledger(writer_grace_s=setup.engine_config.lease_ttl_s)

    def prefill_halves(
        self,
        setup: EngineSetup,
        pool: BlockPool,
        block_ids: BlockIds,
        mover: SimMover,
        metadata: EngineMetadata,
    ) -> PrefillHalves:
        bridges: list[TaskBridge] = []

        def open_bridge(session: Any) -> TaskBridge:
            bridges.append(TaskBridge(session))
            return bridges[0]

        scheduler = PrefillScheduler(
            setup.engine_config,
            setup.config.block_size,
            pool,
            block_ids,
            clients=setup.clients,
            open_bridge=open_bridge,
            clock=setup.clock,
        )
        scheduler.metadata = metadata
        rank = self.prefill_rank(setup, mover, metadata)
        return PrefillHalves(scheduler, rank, bridges[0], mover)

    def prefill_rank(
        self, setup: EngineSetup, mover: SimMover, metadata: EngineMetadata
    ) -> PrefillRank:
        role = setup.engine_config.role
        assert isinstance(role, PrefillEngineConfig)
        rank = PrefillRank(
            mover,
            metadata.ranks[0],
            0,
            setup.alive,
            rank_clock(setup.clock),
            verdict=setup.verdict,
            grant_of=setup.grant_of,
        )
        watch(rank, mover)
        return rank

    def _metadata(self, setup: EngineSetup, mover: SimMover) -> EngineMetadata:
        config = setup.config
        rank = RankMetadata(
            agent=mover.metadata(),
            memory="DRAM",
            device=0,
            regions=mover.memory.regions(),
        )
        return EngineMetadata(
            engine_id=setup.engine_config.engine_id,
            lease_id=setup.engine_config.lease_id,
            fingerprint={"model": config.model, "block_size": str(config.block_size)},
            block_size_tokens=config.block_size,
            num_blocks=config.num_blocks,
            ranks=(rank,),
        )
