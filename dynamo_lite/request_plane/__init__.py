"""The generate endpoint: requests over NATS, token deltas over direct TCP.

`base.py` has the interfaces, `client.py` the frontend's side, `server.py` the worker's side
and `local.py` a client within the worker's process. `failover.py` chooses among many workers
and migrates requests from a lost worker to another one.
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
    FailoverStats,
    OnEnded,
    OnTokens,
)
from dynamo_lite.request_plane.local import LocalGenerateClient
from dynamo_lite.request_plane.placement import WorkerSelector
from dynamo_lite.request_plane.server import GenerateServer

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
