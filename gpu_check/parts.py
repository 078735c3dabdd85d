"""The parts, in the order in which they run."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from gpu_check.bench import Bench
from gpu_check.report import Figures


@dataclass(frozen=True)
class Part:
    """name: also of the function in `module`. on_device: whether it needs the device. limit_s:
    longest run."""

    name: str
    module: str
    about: str
    on_device: bool = True
    limit_s: float = 120.0

    def run(self, bench: Bench) -> Figures:
        """Raises Skip, CheckFailed, and whatever else goes wrong."""
        # What a part needs is imported in its own process, and takes seconds.
        return getattr(import_module(self.module), self.name)(bench)


PARTS: Sequence[Part] = (
    Part("registration", "gpu_check.transfers", "NIXL registers the memory of KV"),
    Part("write", "gpu_check.transfers", "WRITE and READ between two processes, every byte"),
    Part("events", "gpu_check.transfers", "no write before the kernels that compute its blocks"),
    Part("polling", "gpu_check.transfers", "writes move on while the engine's thread is busy"),
    Part(
        "transposition",
        "gpu_check.kernels",
        "blocks are put together in another order",
    ),
    Part("checksums", "gpu_check.kernels", "checksums on the device are those on the host"),
    Part(
        "descriptors",
        "gpu_check.descriptors",
        "descriptors per job when both block pools have been used",
        on_device=False,
    ),
    Part(
        "graph",
        "gpu_check.graph",
        "a graph's greedy tokens are those of plain vLLM",
        limit_s=900.0,
    ),
)
