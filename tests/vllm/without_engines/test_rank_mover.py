"""Which ranks have a transfer thread, and how it works for them."""

from typing import Any

import pytest
import torch
from vllm.platforms import current_platform

from dynamo_lite.disagg.engine_config import (
    DecodeEngineConfig,
    EngineConfig,
    PrefillEngineConfig,
)
from dynamo_lite.disagg.queue.base import QueueConfig
from dynamo_lite.protocol.options import DisaggOptions
from dynamo_lite.transfer.base import Mover
from dynamo_lite.transfer.polled import LISTEN_S, PolledMover
from dynamo_lite.vllm.engine import opened_rank
from dynamo_lite.vllm.engine.opened_rank import open_mover
from tests.unit.test_polled import Wire, eventually, write

PREFILL = PrefillEngineConfig(fence_path="", min_prefix_read_length=128, queue=QueueConfig())
DECODE = DecodeEngineConfig(
    options=DisaggOptions(),
    prefill_component="P",
    queue=QueueConfig(),
)
CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Devices that threads have chosen. No agent is opened."""
    devices: list[Any] = []
    monkeypatch.setattr(opened_rank, "NixlMover", lambda name, secret: Wire())
    # torch.cuda's own makes no context in a new thread on the first device.
    monkeypatch.setattr(current_platform, "set_device", devices.append)
    return devices


def link(role: DecodeEngineConfig | PrefillEngineConfig) -> EngineConfig:
    return EngineConfig(
        namespace="n",
        engine_id="e",
        lease_id=1,
        lease_ttl_s=1,
        nats_url="",
        etcd_url="",
        role=role,
    )


@pytest.mark.parametrize(("device", "expected"), [(CPU, False), (GPU, True)])
def test_ranks_on_a_gpu_have_a_thread(chosen, device, expected):
    mover = open_mover(link(PREFILL), 0, device, lambda: True)
    assert isinstance(mover, PolledMover) == expected
    mover.close()


def test_the_thread_works_on_the_ranks_own_gpu_and_behind_its_fence(chosen):
    looks: list[bool] = []

    def alive() -> bool:
        looks.append(True)
        return True

    mover = open_mover(link(PREFILL), 0, GPU, alive)
    assert isinstance(mover, PolledMover)
    transfer = write(mover)
    eventually(lambda: transfer.over, "the thread has moved it on")
    assert chosen == [GPU] and len(looks) >= 3
    mover.close()


def test_only_a_decode_rank_awaits_notices(chosen, monkeypatch):
    given: list[float] = []

    class Noted(PolledMover):
        def __init__(self, inner: Mover, *, listen_s: float, **options: Any):
            given.append(listen_s)
            super().__init__(inner, listen_s=listen_s, **options)

    monkeypatch.setattr(opened_rank, "PolledMover", Noted)
    for role in (PREFILL, DECODE):
        open_mover(link(role), 0, GPU, lambda: True).close()
    assert given == [0.0, LISTEN_S]
