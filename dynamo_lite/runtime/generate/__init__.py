"""The generate endpoint: requests over NATS, token deltas over direct TCP.

`base.py` has the seams, `client.py` the frontend's side, `server.py` the
worker's, `local.py` the short-cut within one process.
"""

from dynamo_lite.runtime.generate.base import (
    GenerateClient,
    GenerateHandler,
    OnDeltas,
    OnLost,
)
from dynamo_lite.runtime.generate.client import RemoteGenerateClient
from dynamo_lite.runtime.generate.local import LocalGenerateClient
from dynamo_lite.runtime.generate.server import GenerateServer

__all__ = [
    "GenerateClient",
    "GenerateHandler",
    "GenerateServer",
    "LocalGenerateClient",
    "OnDeltas",
    "OnLost",
    "RemoteGenerateClient",
]
