"""What the fork server (`forking.py`) imports before it forks. Importing this has side effects."""

import os
import sys

from dynamo_lite.runtime.process.death_signal import die_with_parent
from dynamo_lite.runtime.process.imports import import_large
from dynamo_lite.serve.child_environment import note_environment

die_with_parent()
note_environment()

# Each child configures vLLM's loggers itself. What the imports print would be on the console.
os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
nowhere = os.open(os.devnull, os.O_WRONLY)
os.dup2(nowhere, sys.stdout.fileno())
os.dup2(nowhere, sys.stderr.fileno())
os.close(nowhere)

import_large("vllm.v1.engine.core")
import_large("dynamo_lite.serve.services.vllm_backend")
