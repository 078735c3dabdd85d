"""Where a worker keeps the files that its engine's processes read."""

import uuid
from pathlib import Path

from dynamo_lite.runtime.host import ProcessSpec


def new_engine_id() -> str:
    """A fresh identity per engine incarnation."""
    return str(uuid.uuid4())


def engine_file(spec: ProcessSpec, suffix: str) -> Path:
    """`<state-dir>/run/<Service>-<i>.<suffix>`; the folder exists afterwards."""
    folder = Path(spec.state_dir) / "run"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{spec.component}-{spec.instance}.{suffix}"
