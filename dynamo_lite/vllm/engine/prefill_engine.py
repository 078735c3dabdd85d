"""Stock vLLM as a prefill engine: each attempt is a request for one token."""

from vllm.lora.request import LoRARequest

from dynamo_lite.disagg.counters import BROKEN_LINK
from dynamo_lite.disagg.engine import AttemptOutcome, OnBrokenLink, OnFirstToken
from dynamo_lite.disagg.prefill.open_attempts import OpenAttempts
from dynamo_lite.protocol.errors import Refused
from dynamo_lite.protocol.prefill import RemotePrefillRequest
from dynamo_lite.protocol.records import EngineMetadata
from dynamo_lite.runtime.claim_cells import Cell
from dynamo_lite.vllm import requests
from dynamo_lite.vllm.engine.core import VllmEngine
from dynamo_lite.vllm.engine.fingerprint import check_peer
from dynamo_lite.vllm.engine.process import EngineContext


class VllmPrefillEngine(VllmEngine):
    """Implements PrefillEngine."""

    def __init__(self, context: EngineContext):
        super().__init__(context)
        self._attempts = OpenAttempts()
        #: Attempts whose adapter is being loaded, unless they were given up.
        self._loading: set[str] = set()

    async def run_prefills(self, on_broken_link: OnBrokenLink) -> None:
        """Reads the engine's outputs for `prefill`. Raises EngineDied."""
        try:
            while (outputs := await self._next()) is not None:
                # First tokens are taken before the outcomes of attempts, which come with the
                # statistics.
                for output in outputs.outputs:
                    self._attempts.sampled(output.request_id, output.new_token_ids)
                stats = outputs.scheduler_stats
                if stats is not None and (counts := stats.kv_connector_stats):
                    for engine_id, why in counts.get(BROKEN_LINK, ()):
                        on_broken_link(engine_id, why)
                    self._attempts.apply(counts)
        finally:
            # A dead process starts no write. The claims are not renewed any more.
            self._attempts.cancel()

    async def prefill(
        self,
        job: RemotePrefillRequest,
        target: EngineMetadata,
        cell: Cell,
        on_first_token: OnFirstToken,
    ) -> AttemptOutcome:
        """Runs one attempt; `run_prefills` must be running.

        Raises Refused for a prompt that this engine cannot take, or an adapter that it does not
        have.
        """
        sampled, lora = self._samples(job), await self._lora(job)
        model = self.config.model_config
        request = requests.prefill(job, target, cell, model, first_token=sampled, lora=lora)
        wanted = on_first_token if sampled else None
        return await self._attempts.run(job.attempt, self._add(request), wanted)

    async def _lora(self, job: RemotePrefillRequest) -> LoRARequest | None:
        """The job's adapter in this engine. Raises Refused."""
        if job.adapter is None:
            return None
        self._loading.add(job.attempt)
        try:
            loaded = await self._loaded(job.adapter)
            if job.attempt not in self._loading:
                raise Refused("it was given up while its adapter was loaded", elsewhere=True)
        finally:
            self._loading.discard(job.attempt)
        return None if loaded is None else loaded[1]

    @property
    def busy(self) -> bool:
        return len(self._attempts) > 0

    def check_peer(self, target: EngineMetadata) -> bool:
        return check_peer(self.metadata[0], target)

    async def abandon(self, attempt: str) -> None:
        self._loading.discard(attempt)
        await self._abort([attempt])

    def _samples(self, job: RemotePrefillRequest) -> bool:
        """Whether this prefill engine computes the first token that the job asks for."""
        if job.first_token is None or self._rules is None:
            return False
        return self._rules.gives(len(job.prompt_token_ids) + 1)

    async def _close(self) -> None:
        self._attempts.cancel()
        await super()._close()
