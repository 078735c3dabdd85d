"""What the project uses of vLLM, held against a vLLM's Python files by pyright: nothing of it runs.

    python -m tests.vllm.seams

Pyright reports missing imports, overrides with other parameters, unknown keywords in calls, and
attributes that a class does not have. `scripts/check` does the same for the whole
project and the vLLM that is installed.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dynamo_lite.vllm.compat import vllm_version

ROOT = Path(__file__).parents[2]
OURS = ROOT / "dynamo_lite" / "vllm"


def breaks(files: Sequence[Path] = (OURS,), instead: Path | None = None) -> list[str]:
    """What these files of the project use and this Python's vLLM does not have, with the place.

    instead: of a folder with a package `vllm`, whose modules go before those of this Python.
    """
    with TemporaryDirectory() as place:
        config: dict[str, Any] = {
            "include": [os.path.relpath(file, place) for file in files],
            "extraPaths": [str(path) for path in (ROOT, instead) if path],
            "typeCheckingMode": "standard",
            "reportMissingModuleSource": "none",
        }
        Path(place, "pyrightconfig.json").write_text(json.dumps(config))
        command = [sys.executable, "-m", "pyright", "-p", place, "--outputjson"]
        ran = subprocess.run(
            [*command, "--pythonpath", sys.executable], capture_output=True, text=True, check=False
        )
    said = json.loads(ran.stdout)
    assert said["summary"]["filesAnalyzed"], ran.stdout
    return [
        f"{Path(each['file']).relative_to(ROOT)}:{each['range']['start']['line'] + 1}:"
        f" {each['message']}"
        for each in said["generalDiagnostics"]
    ]


def vllm_minor() -> int:
    """32 for vLLM 0.32.0."""
    return int(vllm_version().rpartition(" ")[2].split(".")[1])


def main() -> int:
    found = breaks()
    print(*found, f"{len(found)} breaks in {vllm_version()}", sep="\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
