"""vLLM's configuration of one engine: its flags, and the connector."""

from pathlib import Path

from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

from dynamo_lite.disagg.engine_config import ENGINE_CONFIG_FILE, DecodeEngineConfig, EngineConfig
from dynamo_lite.vllm.engine.kv_events import VllmKvEvents
from dynamo_lite.vllm.engine.short_first import let_short_pass
from dynamo_lite.vllm.engine.supported import check_args, check_config


def engine_config(
    flags: list[str], link: EngineConfig | None, link_path: Path, kv_events: VllmKvEvents | None
) -> VllmConfig:
    """flags: those of `vllm serve`. link: None for an engine without remote prefills.
    kv_events: follows the prefix cache; None if its events are not needed.

    Raises StartupError for an engine that does not support remote prefills.
    """
    parsed = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(flags)
    assert parsed is not None
    args = AsyncEngineArgs.from_cli_args(parsed)
    if link is not None:
        check_args(args)
        args.kv_transfer_config = transfer_config(link, link_path)
    if kv_events is not None:
        args.kv_events_config = kv_events.config()
    # The usage context chooses the same defaults as `vllm serve`.
    config = args.create_engine_config(UsageContext.OPENAI_API_SERVER)
    let_short_pass(config, link)
    if link is not None:
        check_config(config, link.role)
    return config


def transfer_config(link: EngineConfig, link_path: Path) -> KVTransferConfig:
    """Makes vLLM load the connector. link_path: the engine config file of `link`."""
    return KVTransferConfig(
        kv_connector="DynamoLiteConnector",
        kv_connector_module_path="dynamo_lite.vllm.engine.connector",
        # A prefill engine also loads prefixes; "kv_both" keeps their blocks until then.
        kv_role="kv_consumer" if isinstance(link.role, DecodeEngineConfig) else "kv_both",
        engine_id=link.engine_id,
        kv_connector_extra_config={ENGINE_CONFIG_FILE: str(link_path)},
        kv_load_failure_policy="recompute",
    )
