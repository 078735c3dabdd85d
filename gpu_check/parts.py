"""The parts, in the order in which they run."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from gpu_check.bench import Bench
from gpu_check.report import Figures


@dataclass(frozen=True)
class Part:
    """One part of the check."""

    #: Also the name of the function in `module`.
    name: str
    module: str
    about: str
    #: Whether it needs the device.
    on_device: bool = True
    #: Timeout.
    limit_s: float = 120.0

    def run(self, bench: Bench) -> Figures:
        """Raises Skip, CheckFailed or any other exception."""
        # Imported here, in the part's own process, because it takes seconds.
        return getattr(import_module(self.module), self.name)(bench)


PARTS: Sequence[Part] = (
    Part("registration", "gpu_check.transfers", "NIXL registers KV memory"),
    Part(
        "write", "gpu_check.transfers", "WRITE and READ between two processes, every byte compared"
    ),
    Part("events", "gpu_check.transfers", "no write before the kernels that compute its blocks"),
    Part("polling", "gpu_check.transfers", "writes progress while the engine's thread is busy"),
    Part(
        "transposition",
        "gpu_check.kernels",
        "blocks are rearranged for another layout",
    ),
    Part(
        "descriptors",
        "gpu_check.descriptors",
        "descriptors per job when both block pools have been in use",
        on_device=False,
    ),
    Part(
        "graph",
        "gpu_check.graph",
        "a graph's greedy tokens equal those of plain vLLM",
        limit_s=900.0,
    ),
)
