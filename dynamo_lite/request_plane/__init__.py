"""The generate endpoint: requests over NATS, token deltas over direct TCP.

`base.py` has the seams, `client.py` the frontend's side, `server.py` the
worker's, `local.py` the short-cut within one process; `failover.py` chooses among
many workers and moves requests from one to another.
"""

from dynamo_lite.request_plane.base import (
    GenerateClient,
    GenerateHandler,
    MakeTransport,
    OnDeltas,
    OnLost,
)
from dynamo_lite.request_plane.client import RemoteGenerateClient
from dynamo_lite.request_plane.failover import (
    MAX_REQUEST_ID,
    FailoverClient,
    OnEnded,
    OnTokens,
)
from dynamo_lite.request_plane.local import LocalGenerateClient
from dynamo_lite.request_plane.selector import WorkerSelector
from dynamo_lite.request_plane.server import GenerateServer
from dynamo_lite.request_plane.stats import FailoverStats

__all__ = [
    "MAX_REQUEST_ID",
    "FailoverClient",
    "FailoverStats",
    "GenerateClient",
    "GenerateHandler",
    "GenerateServer",
    "LocalGenerateClient",
    "MakeTransport",
    "OnDeltas",
    "OnEnded",
    "OnLost",
    "OnTokens",
    "RemoteGenerateClient",
    "WorkerSelector",
]
