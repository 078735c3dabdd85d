"""How vLLM is told to load the connector."""

from pathlib import Path

from vllm.config import KVTransferConfig

from dynamo_lite.disagg.engine_config import (
    ENGINE_CONFIG_FILE,
    DecodeEngineConfig,
    EngineConfig,
)


def transfer_config(link: EngineConfig, link_path: Path) -> KVTransferConfig:
    """link_path: where the engine's processes find the link."""
    return KVTransferConfig(
        kv_connector="DynamoLiteConnector",
        kv_connector_module_path="dynamo_lite.vllm.engine.connector",
        # A prefill engine loads prefixes, and so must not reuse blocks too early.
        kv_role="kv_consumer" if isinstance(link.role, DecodeEngineConfig) else "kv_both",
        engine_id=link.engine_id,
        kv_connector_extra_config={ENGINE_CONFIG_FILE: str(link_path)},
        kv_load_failure_policy="recompute",
    )
