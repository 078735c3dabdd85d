"""vLLM's configuration of one engine: its flags, and the connector."""

from pathlib import Path

from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

from dynamo_lite.disagg.engine_config import ENGINE_CONFIG_FILE, DecodeEngineConfig, EngineConfig
from dynamo_lite.vllm.engine.both_roles import choose_scheduler
from dynamo_lite.vllm.engine.kv_events import VllmKvEvents
from dynamo_lite.vllm.engine.supported import check_args, check_config


def vllm_config(
    flags: list[str],
    engine_config: EngineConfig | None,
    engine_config_path: Path,
    kv_events: VllmKvEvents | None,
) -> VllmConfig:
    """flags: those of `vllm serve`. engine_config: None for an engine without remote prefills.
    kv_events: follows the prefix cache; None if its events are not needed.

    Raises StartupError for an engine that does not support remote prefills.
    """
    parsed = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(flags)
    assert parsed is not None
    args = AsyncEngineArgs.from_cli_args(parsed)
    if engine_config is not None:
        check_args(args)
        args.kv_transfer_config = transfer_config(engine_config, engine_config_path)
    if kv_events is not None:
        args.kv_events_config = kv_events.config()
    # The usage context chooses the same defaults as `vllm serve`.
    config = args.create_engine_config(UsageContext.OPENAI_API_SERVER)
    choose_scheduler(config, engine_config)
    if engine_config is not None:
        check_config(config, engine_config.role)
    return config


def transfer_config(engine_config: EngineConfig, engine_config_path: Path) -> KVTransferConfig:
    """Makes vLLM load the connector. engine_config_path: its file."""
    only_decodes = (
        isinstance(engine_config.role, DecodeEngineConfig) and not engine_config.switchable
    )
    return KVTransferConfig(
        kv_connector="DynamoLiteConnector",
        kv_connector_module_path="dynamo_lite.vllm.engine.connector",
        # A prefill engine also loads prefixes; "kv_both" keeps their blocks until then.
        kv_role="kv_consumer" if only_decodes else "kv_both",
        engine_id=engine_config.engine_id,
        kv_connector_extra_config={ENGINE_CONFIG_FILE: str(engine_config_path)},
        kv_load_failure_policy="recompute",
    )
