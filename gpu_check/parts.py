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
    #: What a report of its failure needs beside the file that the command writes.
    send: str = "the output of nvidia-smi"

    def run(self, bench: Bench) -> Figures:
        """Raises Skip, CheckFailed or any other exception."""
        # Imported here, in the part's own process, because it takes seconds.
        return getattr(import_module(self.module), self.name)(bench)


_UCX = "the output of ucx_info -d, and of the command again with UCX_LOG_LEVEL=info"

PARTS: Sequence[Part] = (
    Part("registration", "gpu_check.transfers", "NIXL registers KV memory"),
    Part(
        "write",
        "gpu_check.transfers",
        "WRITE and READ between two processes, every byte compared",
        send=_UCX,
    ),
    Part(
        "context",
        "gpu_check.transfers",
        "the thread that moves transfers on has a CUDA context",
        send=_UCX,
    ),
    Part("events", "gpu_check.transfers", "no write before the kernels that compute its blocks"),
    Part(
        "posting",
        "gpu_check.transfers",
        "a 32k prompt's write into a decode engine of two ranks keeps no engine's thread",
        send="the output of nvidia-smi topo -m",
    ),
    Part("polling", "gpu_check.transfers", "writes progress while the engine's thread is busy"),
    Part(
        "transposition",
        "gpu_check.transposition",
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
        "a graph's greedy tokens equal those of plain vLLM; its engine names its attention backend",
        limit_s=900.0,
    ),
    Part(
        "overlap",
        "gpu_check.graph",
        "the same with asynchronous scheduling and Model Runner V2",
        limit_s=900.0,
    ),
    Part(
        "sliding",
        "gpu_check.graph",
        "the same for a model of sliding windows, and prompts that end anywhere in a block",
        limit_s=900.0,
    ),
    Part(
        "experts",
        "gpu_check.graph",
        "the same for a model of experts on data-parallel ranks (four GPUs)",
        limit_s=900.0,
    ),
)
