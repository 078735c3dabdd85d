"""What the halves inside an engine's processes must know of the outside.

It travels as a file that only its owner can read, because server URLs may hold
credentials and engines log their configuration; the configuration names the file.
"""

import os
import socket
from pathlib import Path

import msgspec

from dynamo_lite.protocol.codec import decode_json, encode_json
from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.queue.base import QueueConfig

#: Key of `kv_connector_extra_config` that holds the file's path.
ENGINE_CONFIG_FILE = "dynamo_lite_link"


class DecodeEngineConfig(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A decode engine. Times in seconds; see `VllmWorkerConfig` for the thresholds.

    component: whose engine it is, and whose live options it follows.
    prefill_component: whose members are the writers. single_flight_min_length_tokens:
    None for max_local_prefill_length_tokens.
    """

    max_local_prefill_length_tokens: int
    max_prefill_queue_size: int
    remote_prefill_timeout_s: float
    queue_view_max_age_s: float
    prefill_component: str
    queue: QueueConfig
    single_flight_min_length_tokens: int | None = None
    max_remote_prefills: int = 2
    max_prefill_queue_tokens: int = 0
    component: str = "VllmWorker"


class PrefillEngineConfig(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A prefill engine. fence_path: the lease's fence (`runtime/fence.py`).

    kv_checksum_rate: share of the blocks whose contents a commit vouches for.
    min_prefix_read_length_tokens, stream_layers: see `PrefillWorkerConfig`.
    short_length_tokens: jobs of up to so many tokens pass longer ones; None: none do.
    """

    fence_path: str
    min_prefix_read_length_tokens: int
    kv_checksum_rate: float = 0.0
    stream_layers: bool = False
    short_length_tokens: int | None = None


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """lease_id, lease_ttl_s: of the component that runs the engine. transfer_thread: whether
    ranks move transfers on by a thread; None: those whose KV is on a GPU."""

    namespace: str
    engine_id: str
    lease_id: int
    lease_ttl_s: float
    nats_url: str
    etcd_url: str
    role: DecodeEngineConfig | PrefillEngineConfig
    transfer_thread: bool | None = None


def write_engine_config(path: Path, link: EngineConfig) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(encode_json(link))


def read_engine_config(path: str) -> EngineConfig:
    """Raises StartupError where the file cannot be read, ProtocolError for other contents."""
    try:
        content = Path(path).read_bytes()
    except OSError as exc:
        raise StartupError(
            f"this engine process, on host {socket.gethostname()}, cannot read its link"
            f" {path}: {exc.strerror}; all ranks of an engine must be on the host of its component"
        ) from exc
    return decode_json(content, EngineConfig)
