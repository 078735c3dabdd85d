"""What both kinds of workers need to bring up their engine."""

import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from dynamo_lite.components.config import QueueOptions
from dynamo_lite.queue.base import QueueConfig
from dynamo_lite.runtime.host import ProcessSpec

if TYPE_CHECKING:
    from dynamo_lite.engine.remote_prefill.link import DecodeLink, EngineLink, PrefillLink


def engine_file(spec: ProcessSpec, suffix: str) -> Path:
    """`<state-dir>/run/<Service>-<i>.<suffix>`, for the engine's processes to read.

    The folder exists afterwards.
    """
    folder = Path(spec.state_dir) / "run"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{spec.component}-{spec.instance}.{suffix}"


def engine_link(spec: ProcessSpec, lease_id: int, role: "DecodeLink | PrefillLink") -> "EngineLink":
    """The link of a new engine incarnation: its id is fresh."""
    from dynamo_lite.engine.remote_prefill.link import EngineLink

    return EngineLink(
        namespace=spec.namespace,
        engine_id=str(uuid.uuid4()),
        lease_id=lease_id,
        lease_ttl_s=spec.lease_ttl_s,
        nats_url=spec.nats_url,
        etcd_url=spec.etcd_url,
        role=role,
    )


def queue_config(options: QueueOptions) -> QueueConfig:
    return QueueConfig(
        max_depth=options.max_jobs,
        ack_wait_s=options.ack_wait_s,
        max_deliver=options.max_deliver,
    )
