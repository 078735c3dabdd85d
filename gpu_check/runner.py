"""Runs each part in its own process, so that a crash of the driver fails only that part."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import asdict
from pathlib import Path

from gpu_check.bench import Bench
from gpu_check.parts import Part
from gpu_check.report import CheckFailed, Result, Skip

ROOT = Path(__file__).parents[1]
_TAIL_LINES = 15


def skipped(part: Part, reason: str) -> Result:
    return Result(part.name, "skipped", reason, on_device=part.on_device)


def run_part(part: Part, bench: Bench) -> Result:
    """Runs the part in this process."""
    started = time.monotonic()

    def result(outcome, detail="", figures=None) -> Result:
        seconds = time.monotonic() - started
        return Result(part.name, outcome, detail, figures or {}, seconds, part.on_device)

    try:
        return result("ok", figures=part.run(bench))
    except Skip as exc:
        return result("skipped", str(exc))
    except CheckFailed as exc:
        return result("FAILED", str(exc))
    except SystemExit as exc:  # what was started has not come up: the second line says why
        return result("FAILED", str(exc).replace("\n", " ", 1))
    except Exception as exc:
        return result("FAILED", f"{exc!r}\n{traceback.format_exc()}")


def run_apart(part: Part, bench: Bench) -> Result:
    """Runs the part in its own process with the timeout `limit_s`."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        result, log = Path(folder) / "result.json", Path(folder) / "output.log"
        order = json.dumps([asdict(part), asdict(bench)])
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "gpu_check.runner", order, str(result)],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": _python_path()},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            code = process.wait(part.limit_s)
            why = f"its process ended with {_ending(code)}"
        except subprocess.TimeoutExpired:
            why = f"timeout after {part.limit_s:g} s"
        finally:
            _end_group(process)
        if result.exists():
            return Result(**json.loads(result.read_text()))
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
    seconds = time.monotonic() - started
    return Result(part.name, "FAILED", f"{why}\n{tail}", {}, seconds, part.on_device)


def _python_path() -> str:
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def _ending(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _end_group(process: "subprocess.Popen[bytes]") -> None:
    """Kills the whole process group, peers included."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def main() -> None:
    order, path = sys.argv[1:]
    part, bench = json.loads(order)
    result = run_part(Part(**part), Bench(**bench))
    # Renamed when complete: the parent reads the file even if this process crashes.
    draft = Path(path).with_suffix(".draft")
    draft.write_text(json.dumps(asdict(result)))
    draft.rename(path)


if __name__ == "__main__":
    main()
