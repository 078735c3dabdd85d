"""The mover of a rank: NIXL, with a polling thread if that is needed."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from dynamo_lite.disagg.engine_config import DecodeEngineConfig, EngineConfig
from dynamo_lite.runtime.secret import GraphSecret
from dynamo_lite.transfer.authenticated import AuthenticatedMover
from dynamo_lite.transfer.base import Mover
from dynamo_lite.transfer.nixl import NixlMover
from dynamo_lite.transfer.polled import LISTEN_S, PolledMover


def open_mover(
    config: EngineConfig, rank: int, device: torch.device, alive: Callable[[], bool]
) -> Mover:
    """rank: this process's index. device: where its KV is. alive: whether the fence is open.

    Without a GPU there is no thread by default: a write to shared memory is over when it was
    posted, and a thread would only take time from the engine.
    """
    mover: Mover = NixlMover(f"{config.engine_id}-{rank}")
    if config.secret_file is not None:
        mover = AuthenticatedMover(mover, GraphSecret(Path(config.secret_file)))
    on_gpu = device.type != "cpu"
    if not (on_gpu if config.transfer_thread is None else config.transfer_thread):
        return mover
    return PolledMover(
        mover,
        alive=alive,
        # A prefill rank gets no notifications: polling its own transfers is enough.
        listen_s=LISTEN_S if isinstance(config.role, DecodeEngineConfig) else 0.0,
        # UCX's CUDA transports work in the calling thread's context.
        enter=partial(torch.cuda.set_device, device) if on_gpu else lambda: None,
    )
