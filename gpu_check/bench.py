"""The device under test."""

from dataclasses import dataclass

from gpu_check.report import Skip


@dataclass(frozen=True)
class Bench:
    """The device under test.

    The writing process uses the first device, its peer the second one, or the same if there
    is only one.
    """

    #: "cuda" or "cpu".
    kind: str
    name: str
    #: Devices of this kind.
    count: int

    @property
    def here(self) -> str:
        return "cpu" if self.kind == "cpu" else "cuda:0"

    @property
    def there(self) -> str:
        return "cpu" if self.kind == "cpu" else f"cuda:{min(1, self.count - 1)}"

    @property
    def memory(self) -> str:
        """NIXL's name of the kind of memory."""
        return "DRAM" if self.kind == "cpu" else "VRAM"

    @property
    def on_gpu(self) -> bool:
        return self.kind == "cuda"


def find_bench(kind: str) -> Bench:
    """Raises Skip when there is no such device."""
    try:
        import torch
    except ImportError as exc:
        raise Skip(f"torch cannot be imported: {exc}") from exc
    if kind == "cpu":
        return Bench("cpu", "host memory", 1)
    if torch.version.cuda is None:
        raise Skip(f"torch {torch.__version__} is built without CUDA")
    if not torch.cuda.is_available():
        raise Skip(f"torch {torch.__version__} finds no CUDA device")
    return Bench("cuda", torch.cuda.get_device_name(0), torch.cuda.device_count())
