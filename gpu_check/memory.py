"""A rank's KV pool on the device, laid out as vLLM's, with its NIXL agent."""

import time
import zlib
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import Self

import torch
from vllm.platforms import current_platform

from dynamo_lite.protocol.records import KvRegion, RankMetadata
from dynamo_lite.transfer.base import Mover, Transfer
from dynamo_lite.transfer.layout import plain_array, region_of_tensor
from dynamo_lite.transfer.nixl import NixlMover
from dynamo_lite.transfer.polled import PolledMover
from gpu_check.report import CheckFailed

LAYERS, BLOCKS, HEADS, TOKENS, VALUES = 8, 256, 4, 16, 128
Shape = tuple[int, int, int, int, int]
#: Timeout of a transfer.
WAIT_S = 30.0


class Pool:
    """A pool of zeros.

    name: of its NIXL agent. thread: whether a thread polls its transfers. shape: layers, blocks,
    heads, tokens, values. first_head: index of its first head in the model.
    """

    def __init__(
        self,
        name: str,
        device: str,
        *,
        thread: bool = False,
        shape: Shape = (LAYERS, BLOCKS, HEADS, TOKENS, VALUES),
        first_head: int = 0,
    ):
        self.device = torch.device(device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.tensor = torch.zeros(shape, dtype=torch.int16, device=self.device)
        self.mover = _mover(name, self.device, thread=thread)
        storage = self.tensor.untyped_storage()
        memory, index = ("DRAM" if device == "cpu" else "VRAM"), self.device.index or 0
        self.synchronize()
        started = time.perf_counter()
        self.mover.register([(storage.data_ptr(), storage.nbytes())], memory, index)
        self.registered_s = time.perf_counter() - started
        self.rank = RankMetadata(
            agent=self.mover.metadata(),
            memory=memory,
            device=index,
            regions=tuple(
                region(f"layer {layer}", self.tensor[layer], first_head=first_head)
                for layer in range(shape[0])
            ),
        )

    @property
    def bytes(self) -> int:
        return self.tensor.untyped_storage().nbytes()

    def random(self, seed: int) -> torch.Tensor:
        """KV for the whole pool on the device, determined by the seed."""
        generator = torch.Generator().manual_seed(seed)
        shape = self.tensor.shape
        values = torch.randint(-(1 << 15), 1 << 15, shape, generator=generator, dtype=torch.int16)
        return values.to(self.device)

    def fill(self, seed: int) -> None:
        self.tensor.copy_(self.random(seed))
        self.synchronize()

    def checksum(self, blocks: Sequence[int]) -> int:
        return zlib.crc32(self.tensor[:, list(blocks)].cpu().numpy().tobytes())

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.mover.close()


def region(
    layer: str, tensor: torch.Tensor, *, address: int | None = None, first_head: int = 0
) -> KvRegion:
    """The region of a layer's KV.

    Args:
        tensor: [blocks, heads, tokens, values] in any order in memory.
        address: of the first byte; None: the tensor's own.
    """
    item = tensor.element_size()
    strides = [stride * item for stride in tensor.stride()]
    array = plain_array(tensor.shape, strides, item)
    assert array is not None
    return region_of_tensor(
        layer,
        address=tensor.data_ptr() if address is None else address,
        shape=tensor.shape,
        strides_bytes=strides,
        item_bytes=item,
        num_blocks=tensor.shape[0],
        heads_dim=1,
        first_head=first_head,
        tokens=tensor.shape[2],
        arrays=(array,),
    )


def finish(transfer: Transfer) -> None:
    """Polls the transfer until it is done. Raises TransferError, CheckFailed."""
    deadline = time.monotonic() + WAIT_S
    while not transfer.done():
        if time.monotonic() > deadline:
            raise CheckFailed(f"a transfer is not done within {WAIT_S:g} s")


def _mover(name: str, device: torch.device, *, thread: bool) -> Mover:
    mover = NixlMover(name)
    if not thread:
        return mover
    if device.type == "cuda":
        return PolledMover(mover, enter=partial(current_platform.set_device, device))
    return PolledMover(mover)
