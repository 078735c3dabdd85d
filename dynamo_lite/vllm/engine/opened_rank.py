"""A rank with its mover and registered memory: what is open once vLLM has made the KV caches."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from vllm.platforms import current_platform

from dynamo_lite.disagg.decode.rank import DecodeRank
from dynamo_lite.disagg.engine_config import DecodeEngineConfig, EngineConfig, PrefillEngineConfig
from dynamo_lite.disagg.prefill.rank import PrefillRank
from dynamo_lite.protocol.codec import encode
from dynamo_lite.runtime.fence import FenceReader
from dynamo_lite.transfer.base import Mover
from dynamo_lite.transfer.nixl import NixlMover
from dynamo_lite.transfer.polled import LISTEN_S, PolledMover
from dynamo_lite.vllm.engine.connector_types import RankHandshake
from dynamo_lite.vllm.engine.kv_memory import rank_index, register
from dynamo_lite.vllm.engine.supported import refusal_recorded

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


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
    fence = FenceReader(Path(role.fence_path)) if isinstance(role, PrefillEngineConfig) else None
    alive = (lambda: True) if fence is None else fence.open
    with ExitStack() as on_failure:
        mover = open_mover(config, index, device, alive)
        on_failure.callback(mover.close)
        with refusal_recorded(config_file):
            kv = register(kv_caches, mover, vllm_config, kv_cache_config)
        if isinstance(role, PrefillEngineConfig):
            assert fence is not None
            rank = PrefillRank(
                mover,
                kv.rank,
                index,
                alive,
                verdict=fence.verdict,
                grant_of=fence.grant_of,
                open_transposer=kv.open_transposer,
            )
        else:
            rank = DecodeRank(mover, kv.rank)
        on_failure.pop_all()
    return OpenedRank(rank, RankHandshake(encode(kv.rank), kv.orders, kv.packings), mover)


def open_mover(
    config: EngineConfig, rank: int, device: torch.device, alive: Callable[[], bool]
) -> Mover:
    """Opens NIXL, with a polling thread where the KV is on a GPU.

    rank: this process's index. device: where its KV is. alive: whether the fence is open.

    A write to shared memory is over when it was posted: a thread would only take time from the
    engine.
    """
    mover = NixlMover(f"{config.engine_id}-{rank}")
    if device.type == "cpu":
        return mover
    return PolledMover(
        mover,
        alive=alive,
        # A prefill rank gets no notifications: polling its own transfers is enough.
        listen_s=LISTEN_S if isinstance(config.role, DecodeEngineConfig) else 0.0,
        # UCX's CUDA transports work in the calling thread's context. torch alone would make none in
        # a new thread on the first device.
        enter=partial(current_platform.set_device, device),
    )
