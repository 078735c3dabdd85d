"""vLLM's configuration of one engine, from its flags and what we add to them."""

from pathlib import Path

from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

from dynamo_lite.disagg.engine_config import EngineConfig
from dynamo_lite.vllm.engine.kv_events import VllmKvEvents
from dynamo_lite.vllm.engine.short_first import let_short_pass
from dynamo_lite.vllm.engine.supported import check_args, check_config
from dynamo_lite.vllm.engine.transfer_config import transfer_config


def engine_config(
    flags: list[str], link: EngineConfig | None, link_path: Path, kv_events: VllmKvEvents | None
) -> VllmConfig:
    """flags: as `vllm serve` takes them. link: of an engine that takes part in remote
    prefills. kv_events: what follows its prefix cache, if anything shall.

    Raises StartupError for an engine that cannot take part so.
    """
    parsed = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(flags)
    assert parsed is not None
    args = AsyncEngineArgs.from_cli_args(parsed)
    if link is not None:
        check_args(args)
        args.kv_transfer_config = transfer_config(link, link_path)
    if kv_events is not None:
        args.kv_events_config = kv_events.config()
    # The context chooses defaults for the device: those that `vllm serve` has.
    config = args.create_engine_config(UsageContext.OPENAI_API_SERVER)
    let_short_pass(config, link)
    if link is not None:
        check_config(config, link.role)
    return config
