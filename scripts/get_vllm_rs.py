"""Keeps `vllm-rs`, the program of vLLM's Rust frontend, in `.dynamo-lite/vllm-rs`.

    python scripts/get_vllm_rs.py

vLLM's CUDA wheel contains the program; its CPU build does not. pip downloads the wheel of the
installed version, some hundred megabytes, into a temporary folder; the program is taken out,
its checksum is compared with the wheel's RECORD, and the wheel is deleted. Does nothing when
the program is there already. Prints its path.
"""

import base64
import csv
import hashlib
import io
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.vllm.compat import no_rust_edge, vllm_version
from dynamo_lite.vllm.edge_choice import PROGRAM, beside_vllm, check_version

_ABOVE = Path(__file__).resolve().parent.parent
#: In the checkout, or in the working directory where this script is in an installed package.
KEPT = (Path.cwd() if _ABOVE.name == "dynamo_lite" else _ABOVE) / ".dynamo-lite" / PROGRAM
_MEMBER = f"vllm/{PROGRAM}"


def main() -> None:
    installed = vllm_version()
    if not installed:
        sys.exit("error: vLLM is not installed; run `make setup`")
    if why := no_rust_edge(installed):
        sys.exit(f"error: {why}")
    if (found := beside_vllm() or _kept(installed)) is None:
        version = installed.partition(" ")[2].partition("+")[0]
        with tempfile.TemporaryDirectory(prefix="vllm-rs-") as folder:
            found = take_out(_download(version, Path(folder)), KEPT)
        check_version(found, installed)
    print(found)


def _kept(installed: str) -> Path | None:
    """The program of an earlier call, if it has the right version."""
    if not KEPT.is_file():
        return None
    try:
        check_version(KEPT, installed)
    except StartupError as exc:
        print(f"{exc}; getting another one", file=sys.stderr)
        return None
    return KEPT


def _download(version: str, folder: Path) -> Path:
    """The wheel. By pip, which knows this machine's package index, proxy and certificates."""
    print(f"downloading the wheel of vLLM {version} for {PROGRAM}", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "download", f"vllm=={version}", "--dest", str(folder)]
    options = ["--no-deps", "--no-cache-dir", "--only-binary=:all:", "--retries=1", "--timeout=15"]
    if subprocess.run([*command, *options], stdout=sys.stderr).returncode:
        sys.exit(f"error: pip could not download the wheel of vLLM {version}: see above")
    return next(folder.glob("*.whl"))


def take_out(wheel: Path, target: Path) -> Path:
    """Writes the program to `target`. Exits if the wheel has none, or a damaged one."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        if _MEMBER not in names:
            sys.exit(f"error: {wheel.name} has no {_MEMBER}")
        program = archive.read(_MEMBER)
        record = next(name for name in names if name.endswith(".dist-info/RECORD"))
        rows = csv.reader(io.StringIO(archive.read(record).decode()))
        wanted = next((row[1] for row in rows if row and row[0] == _MEMBER), "")
    digest = base64.urlsafe_b64encode(hashlib.sha256(program).digest()).rstrip(b"=").decode()
    if wanted != f"sha256={digest}":
        sys.exit(f"error: {_MEMBER} of {wheel.name} differs from its checksum: {wanted!r}")
    target.parent.mkdir(parents=True, exist_ok=True)
    # Replaced at once: the program may be running.
    part = target.with_suffix(".part")
    part.write_bytes(program)
    part.chmod(0o755)
    return part.replace(target)


if __name__ == "__main__":
    main()
