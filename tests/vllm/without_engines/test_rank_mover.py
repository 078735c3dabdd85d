"""Which ranks have a transfer thread, and how it works for them."""

import math
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform

from dynamo_lite.transfer.base import Mover, PollLimit
from dynamo_lite.transfer.polled import LISTEN_S, PolledMover
from dynamo_lite.vllm.engine import opened_rank
from dynamo_lite.vllm.engine.opened_rank import open_mover
from tests.builders import DECODE_ROLE, PREFILL_ROLE, engine_config
from tests.unit.test_polled import Wire, eventually, write

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Devices that threads have chosen. No agent is opened."""
    devices: list[Any] = []
    monkeypatch.setattr(opened_rank, "NixlMover", lambda name: Wire())
    # torch.cuda's own makes no context in a new thread on the first device.
    monkeypatch.setattr(current_platform, "set_device", devices.append)
    return devices


@pytest.mark.parametrize(("device", "expected"), [(CPU, False), (GPU, True)])
def test_ranks_on_a_gpu_have_a_thread(chosen, device, expected):
    mover = open_mover(engine_config(PREFILL_ROLE), 0, device, PollLimit())
    assert isinstance(mover, PolledMover) == expected
    mover.close()


def test_the_thread_works_on_the_ranks_own_gpu_and_up_to_its_limit(chosen):
    limit = PollLimit(0.0)
    mover = open_mover(engine_config(PREFILL_ROLE), 0, GPU, limit)
    assert isinstance(mover, PolledMover)
    transfer = write(mover)
    eventually(lambda: chosen == [GPU], "the thread has begun")
    assert not transfer.over
    limit.until = math.inf
    eventually(lambda: transfer.over, "the thread has moved it on")
    mover.close()


def test_only_a_decode_rank_awaits_notices(chosen, monkeypatch):
    given: list[float] = []

    class Noted(PolledMover):
        def __init__(self, inner: Mover, *, listen_s: float, **options: Any):
            given.append(listen_s)
            super().__init__(inner, listen_s=listen_s, **options)

    monkeypatch.setattr(opened_rank, "PolledMover", Noted)
    for role in (PREFILL_ROLE, DECODE_ROLE):
        open_mover(engine_config(role), 0, GPU, PollLimit()).close()
    assert given == [0.0, LISTEN_S]
