"""Tiny models of other kinds than the demo model."""

import subprocess
import sys
from pathlib import Path

from tests.vllm.graph import MODEL

SCRIPT = Path("scripts/tiny_model.py")


def model_of(shape: str) -> Path:
    """Made where the demo model lies, once: vLLM's verdict on arguments is kept by path."""
    directory = MODEL.parent / shape
    subprocess.run([sys.executable, SCRIPT, directory, shape], check=True)
    return directory
