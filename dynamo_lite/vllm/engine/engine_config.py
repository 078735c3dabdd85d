"""vLLM's configuration of one engine: its flags, its scheduler, and the connector."""

from pathlib import Path

from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

from dynamo_lite.disagg.engine_config import ENGINE_CONFIG_FILE, DecodeEngineConfig, EngineConfig
from dynamo_lite.vllm.engine.arrivals import schedule_arrivals_at_once
from dynamo_lite.vllm.engine.kv_events import kv_events_config
from dynamo_lite.vllm.engine.short_first import let_short_pass
from dynamo_lite.vllm.engine.supported import check_args, check_config


def vllm_config(
    flags: list[str],
    engine_config: EngineConfig | None,
    engine_config_path: Path,
    *,
    kv_events: bool = False,
) -> VllmConfig:
    """flags: those of `vllm serve`. engine_config: None for an engine without remote prefills.
    kv_events: whether the engine publishes the events of its prefix cache.

    Raises StartupError for an engine that does not support remote prefills.
    """
    parsed = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(flags)
    assert parsed is not None
    args = AsyncEngineArgs.from_cli_args(parsed)
    args.mm_processor_cache_gb = 0  # features come whole from the Frontends
    if engine_config is not None:
        check_args(args)
        args.kv_transfer_config = transfer_config(engine_config, engine_config_path)
    if kv_events:
        args.kv_events_config = kv_events_config()
    # The usage context chooses the same defaults as `vllm serve`.
    config = args.create_engine_config(UsageContext.OPENAI_API_SERVER)
    let_short_pass(config, engine_config)
    schedule_arrivals_at_once(config, engine_config)
    if engine_config is not None:
        check_config(config)
    return config


def transfer_config(engine_config: EngineConfig, engine_config_path: Path) -> KVTransferConfig:
    """Makes vLLM load the connector. engine_config_path: its file."""
    return KVTransferConfig(
        kv_connector="DynamoLiteConnector",
        kv_connector_module_path="dynamo_lite.vllm.engine.connector",
        # A prefill engine also loads prefixes; "kv_both" keeps their blocks until then.
        kv_role="kv_consumer" if isinstance(engine_config.role, DecodeEngineConfig) else "kv_both",
        engine_id=engine_config.engine_id,
        kv_connector_extra_config={ENGINE_CONFIG_FILE: str(engine_config_path)},
        kv_load_failure_policy="recompute",
    )
