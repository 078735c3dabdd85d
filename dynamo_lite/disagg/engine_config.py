"""What the connector halves in an engine's processes must know about component, servers and
options.

It travels as a file that only its owner can read, because server URLs may contain
credentials and engines log their configuration. vLLM's configuration names the file.
"""

import os
import socket
from pathlib import Path

import msgspec

from dynamo_lite.disagg.queue.base import QueueConfig
from dynamo_lite.protocol.codec import decode_json, encode_json
from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.protocol.options import DisaggOptions

#: Key of `kv_connector_extra_config` that holds the file's path.
ENGINE_CONFIG_FILE = "dynamo_lite_engine_config"


class DecodeEngineConfig(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A decode engine."""

    #: From the configuration file. The engine also follows the live options of `component`.
    options: DisaggOptions
    #: The component whose members write KV for this engine.
    prefill_component: str
    queue: QueueConfig
    #: The component that runs this engine.
    component: str = "VllmWorker"


class PrefillEngineConfig(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A prefill engine."""

    #: The file of the claim cells (`runtime/claim_cells.py`).
    cells_path: str
    min_prefix_read_length: int
    queue: QueueConfig


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine's processes must know of the component that runs the engine."""

    namespace: str
    engine_id: str
    #: Lease of the component that runs the engine.
    lease_id: int
    lease_ttl_s: float
    nats_url: str
    etcd_url: str
    role: DecodeEngineConfig | PrefillEngineConfig


def write_engine_config(path: Path, config: EngineConfig) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(encode_json(config))


def read_engine_config(path: str) -> EngineConfig:
    """Raises StartupError where the file cannot be read, ProtocolError for other contents."""
    try:
        content = Path(path).read_bytes()
    except OSError as exc:
        raise StartupError(
            f"this engine process, on host {socket.gethostname()}, cannot read its configuration"
            f" {path}: {exc.strerror}; all ranks of an engine must be on the host of its component"
        ) from exc
    return decode_json(content, EngineConfig)
