"""Wall clocks that differ between hosts.

The kernel has one wall clock for all namespaces. So a preloaded library, `wall.c`, shifts it in
each process. It is compiled at the start.
"""

import shutil
import subprocess
from pathlib import Path

_SOURCE = Path(__file__).with_name("wall.c")


def no_compiler() -> str:
    """Why wall clocks cannot differ here; empty if they can."""
    return "" if shutil.which("gcc") else "wall clocks that differ need a C compiler (gcc)"


def build(directory: Path) -> Path:
    """Returns the library."""
    library = directory / "wall.so"
    command = ["gcc", "-O2", "-Wall", "-Werror", "-shared", "-fPIC"]
    subprocess.run([*command, "-o", str(library), str(_SOURCE), "-ldl"], check=True, timeout=60)
    return library


def shifted(library: Path, by_s: int) -> dict[str, str]:
    """The environment of a process whose wall clock is `by_s` seconds ahead; negative: behind."""
    return {"LD_PRELOAD": str(library.resolve()), "WALL_SHIFT_S": str(by_s)}
