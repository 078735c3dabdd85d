"""A rank with its mover and registered memory: what is open once vLLM has made the KV caches."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.platforms import current_platform

from dynamo_lite.disagg.decode.rank import DecodeRank
from dynamo_lite.disagg.engine_config import DecodeEngineConfig, EngineConfig, PrefillEngineConfig
from dynamo_lite.disagg.prefill.rank import PrefillRank
from dynamo_lite.protocol.codec import encode
from dynamo_lite.runtime.claim_cells import CellReader
from dynamo_lite.transfer.base import Mover, PollLimit
from dynamo_lite.transfer.nixl import NixlMover
from dynamo_lite.transfer.polled import LISTEN_S, PolledMover
from dynamo_lite.vllm.engine.kv_memory import rank_index, register, storages_of
from dynamo_lite.vllm.engine.supported import refusal_recorded
from dynamo_lite.vllm.engine.transposer import TorchTransposer

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


#: For how long after the end of its claim a write in flight is polled, as a part of the lease's
#: time-to-live. What it has given to the kernel by then takes up to `UCX_TCP_USER_TIMEOUT`
#: (`serve/child_environment.py`); together less than one time-to-live, after which the decode
#: engine releases the blocks. Longer than that timeout: so the write to a host that is lost fails
#: before this engine has to end.
_MOVE = 0.5


@dataclass
class RankHandshake(KVConnectorHandshakeMetadata):
    """From each rank to the scheduler half, once."""

    #: The rank's `RankMetadata` in msgpack.
    rank: bytes
    #: Those of its layers' blocks, see `kv_memory.py`.
    layouts: frozenset[str]


@dataclass(frozen=True)
class OpenedRank:
    rank: DecodeRank | PrefillRank
    #: For the scheduler half.
    handshake: RankHandshake
    mover: Mover

    def close(self) -> None:
        if isinstance(self.mover, PolledMover):
            # First: the rank may have to leave transfers in flight untouched.
            self.mover.stop()
        self.rank.close()


def open_rank(
    config: EngineConfig,
    config_file: Path,
    kv_caches: Mapping[str, torch.Tensor],
    vllm_config: "VllmConfig",
    kv_cache_config: "KVCacheConfig",
) -> OpenedRank:
    """Registers the KV caches with a mover of this rank.

    kv_caches: vLLM's KV by layer. Raises ValueError with the layer's name for a layout that is not
    supported; beside `config_file` this is recorded for the component.
    """
    index, role = rank_index(vllm_config), config.role
    device = next(iter(kv_caches.values())).device
    limit = PollLimit()
    with ExitStack() as on_failure:
        mover = open_mover(config, index, device, limit)
        on_failure.callback(mover.close)
        with refusal_recorded(config_file):
            own, layouts = register(kv_caches, mover, vllm_config, kv_cache_config)
        if isinstance(role, PrefillEngineConfig):
            rank = PrefillRank(
                mover,
                own,
                index,
                CellReader(Path(role.cells_path)).until,
                move_s=_MOVE * config.lease_ttl_s,
                limit=limit,
                open_transposer=partial(TorchTransposer, storages_of(kv_caches.values())),
            )
        else:
            rank = DecodeRank(mover, own)
        on_failure.pop_all()
    return OpenedRank(rank, RankHandshake(encode(own), layouts), mover)


def open_mover(config: EngineConfig, rank: int, device: torch.device, limit: PollLimit) -> Mover:
    """Opens NIXL, with a polling thread where the KV is on a GPU.

    rank: this process's index. device: where its KV is. limit: until when transfers are polled.

    A write to shared memory is over when it was posted: a thread would only take time from the
    engine.
    """
    mover = NixlMover(f"{config.engine_id}-{rank}")
    if device.type == "cpu":
        return mover
    return PolledMover(
        mover,
        limit=limit,
        # A prefill rank gets no notifications: polling its own transfers is enough.
        listen_s=LISTEN_S if isinstance(config.role, DecodeEngineConfig) else 0.0,
        # UCX's CUDA transports work in the calling thread's context. torch alone would make none in
        # a new thread on the first device.
        enter=partial(current_platform.set_device, device),
    )
