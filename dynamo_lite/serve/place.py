"""Where the processes of a graph meet."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class GraphPlace:
    nats_url: str
    etcd_url: str
    #: The secret file (`runtime/secret.py`); None: messages are not authenticated.
    secret: Path | None
