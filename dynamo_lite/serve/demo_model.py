"""The tiny demo model of the packaged configurations, made where it is missing."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.serve.child_environment import child_environment
from dynamo_lite.serve.config import ServiceConfig
from dynamo_lite.serve.packaged import packaged_file

DEMO_MODEL = ".dynamo-lite/models/tiny"
_TIMEOUT_S = 300.0


def make_demo_model(services: Sequence[ServiceConfig]) -> None:
    """Makes the model if one of these services asks for it and it is not there.

    It takes some seconds, because transformers and torch are imported, in a process of its own.
    Nothing is downloaded. Raises StartupError.
    """
    wanted = any(service.flags.get("model") == DEMO_MODEL for service in services)
    if not wanted or (Path(DEMO_MODEL) / "config.json").is_file():
        return
    script = packaged_file("scripts", "tiny_model.py")
    if script is None:
        raise StartupError(f"no model at {DEMO_MODEL}, and no scripts/tiny_model.py to make it")
    print(f"making the demo model in {DEMO_MODEL}", file=sys.stderr)
    try:
        made = subprocess.run(
            [sys.executable, str(script), DEMO_MODEL],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            env=child_environment({}),
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise StartupError(f"the demo model could not be made: {exc}") from exc
    if made.returncode != 0:
        last = made.stderr.strip().splitlines()[-1:] or ["no message"]
        raise StartupError(f"the demo model could not be made: {last[0]}")
