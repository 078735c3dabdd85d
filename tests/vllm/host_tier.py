"""Memory for vLLM's OffloadingConnector where there is no GPU: its own copies need one.

Scheduling and bookkeeping are vLLM's. A transfer is made in the last moment, so that a block that
is written too early, or used too early, spoils it.
"""

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

#: Of the worker's kv-transfer-config.
CONFIG = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "spec_name": "HostSpec",
        "spec_module_path": __name__,
        "cpu_bytes_to_use": 1 << 30,
    },
}
#: Steps for which a transfer is under way. Saves are slow, so that blocks are used again before.
_LOAD_STEPS, _SAVE_STEPS = 5, 3000


class HostSpec(CPUOffloadingSpec):
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        assert self.blocks_per_chunk == 1
        return _Copies(kv_caches, self.num_chunks)


class _Copies(OffloadingWorker):
    def __init__(self, kv_caches: CanonicalKVCaches, chunks: int):
        self._engine = [each.tensor for each in kv_caches.tensors]
        self._host = [
            torch.zeros((chunks, each.shape[1]), dtype=torch.int8) for each in self._engine
        ]
        #: By job: steps left, blocks of the engine, those here, and whether it is a load.
        self._jobs: dict[int, tuple[int, list[int], list[int], bool]] = {}

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        assert isinstance(dst_spec, CPULoadStoreSpec)
        self._jobs[job_id] = _SAVE_STEPS, list(src_spec.block_ids), list(dst_spec.block_ids), False
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        assert isinstance(src_spec, CPULoadStoreSpec)
        self._jobs[job_id] = _LOAD_STEPS, list(dst_spec.block_ids), list(src_spec.block_ids), True
        return True

    def get_finished(self) -> list[TransferResult]:
        self._jobs = {job: (left - 1, *rest) for job, (left, *rest) in self._jobs.items()}
        over = [job for job, (left, *_) in self._jobs.items() if left <= 0]
        for job in over:
            _, theirs, here, load = self._jobs.pop(job)
            for engine, host in zip(self._engine, self._host, strict=True):
                if load:
                    engine[theirs] = host[here]
                else:
                    host[here] = engine[theirs]
        return [TransferResult(job, success=True) for job in over]

    def wait(self, job_ids: set[int]) -> None:
        """Until the next look the engine computes nothing: `get_finished` follows."""
        for job in job_ids & self._jobs.keys():
            _, theirs, here, load = self._jobs[job]
            assert not load
            for engine, host in zip(self._engine, self._host, strict=True):
                host[here] = engine[theirs]
            self._jobs[job] = 0, [], [], False
