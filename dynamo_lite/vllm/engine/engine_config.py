"""vLLM's configuration of one engine: its flags, its scheduler, and the connector."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.config import KVEventsConfig, KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.network_utils import get_open_zmq_ipc_path

from dynamo_lite.disagg.engine_config import ENGINE_CONFIG_FILE, DecodeEngineConfig, EngineConfig
from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.vllm.engine.arrivals import ArrivalScheduler, AsyncArrivalScheduler
from dynamo_lite.vllm.engine.connector_types import CONNECTOR
from dynamo_lite.vllm.engine.short_first import AsyncShortFirst, ShortFirst
from dynamo_lite.vllm.engine.supported import WITHOUT, check_config

#: Also the name of vLLM's own, see there.
_MULTI = "MultiConnector"
#: Those that go beside ours: they hold blocks, or say which, as long as they read them, and
#: nothing is left of a load that was not wanted.
_BESIDE = ("OffloadingConnector", "SimpleCPUOffloadConnector", "MooncakeStoreConnector")
#: Of the other one's configuration, which the engine has once.
_OF_THE_ENGINE = ("engine_id", "kv_load_failure_policy")


def vllm_config(
    flags: list[str],
    engine_config: EngineConfig | None,
    engine_config_path: Path,
    *,
    kv_events: bool = False,
) -> VllmConfig:
    """flags: those of `vllm serve`. engine_config: None for an engine without remote prefills.
    kv_events: whether the engine publishes the events of its prefix cache, if it has exactly one.

    Raises StartupError for an engine that does not support remote prefills.
    """
    parsed = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(flags)
    assert parsed is not None
    args = AsyncEngineArgs.from_cli_args(parsed)
    args.mm_processor_cache_gb = 0  # features come whole from the Frontends
    if engine_config is not None:
        args.kv_transfer_config = transfer_config(engine_config, engine_config_path, _beside(args))
    if kv_events:
        args.kv_events_config = KVEventsConfig(
            enable_kv_cache_events=True, publisher="zmq", endpoint=get_open_zmq_ipc_path()
        )
    # The usage context chooses the same defaults as `vllm serve`.
    config = args.create_engine_config(UsageContext.OPENAI_API_SERVER)
    one = config.parallel_config.data_parallel_size == 1
    if kv_events and not (one and config.cache_config.enable_prefix_caching):
        config.kv_events_config = None
    if engine_config is not None:
        if config.scheduler_config.scheduler_cls is None:
            config.scheduler_config.scheduler_cls = _scheduler(config, engine_config)
        check_config(config)
    return config


def _scheduler(config: VllmConfig, engine_config: EngineConfig) -> str:
    """The name of our scheduler for the engine."""
    decodes = isinstance(engine_config.role, DecodeEngineConfig)
    plain, overlapping = (
        (ArrivalScheduler, AsyncArrivalScheduler) if decodes else (ShortFirst, AsyncShortFirst)
    )
    made = overlapping if config.scheduler_config.async_scheduling else plain
    return f"{made.__module__}.{made.__name__}"


def transfer_config(
    engine_config: EngineConfig, engine_config_path: Path, beside: KVTransferConfig | None = None
) -> KVTransferConfig:
    """Makes vLLM load the connector. engine_config_path: its file. beside: another connector's."""
    ours: dict[str, Any] = {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": "dynamo_lite.vllm.engine.connector",
        # A prefill engine also loads prefixes; "kv_both" keeps their blocks until then.
        "kv_role": (
            "kv_consumer" if isinstance(engine_config.role, DecodeEngineConfig) else "kv_both"
        ),
        "kv_connector_extra_config": {ENGINE_CONFIG_FILE: str(engine_config_path)},
        "kv_load_failure_policy": "recompute",
    }
    if beside is None:
        return KVTransferConfig(engine_id=engine_config.engine_id, **ours)
    other = {name: each for name, each in asdict(beside).items() if name not in _OF_THE_ENGINE}
    multi = {
        "kv_connector": _MULTI,
        "kv_connector_module_path": "dynamo_lite.vllm.engine.multi_connector",
        "kv_connector_extra_config": {
            **ours["kv_connector_extra_config"],
            "connectors": [ours, other],
        },
    }
    return KVTransferConfig(engine_id=engine_config.engine_id, **(ours | multi))


def _beside(args: AsyncEngineArgs) -> KVTransferConfig | None:
    """The connector that the user wants beside ours. Raises StartupError."""
    given, size = args.kv_transfer_config, args.kv_offloading_size
    if size is not None and given is not None:
        raise StartupError("kv-offloading-size and kv-transfer-config: set one of them")
    args.kv_offloading_size = None  # vLLM would replace our connector
    if size is not None:
        # As vLLM resolves it.
        if args.kv_offloading_backend != "native":
            raise StartupError(
                f"kv-offloading-backend: {args.kv_offloading_backend} does not go with remote"
                f" prefill: remove it, or {WITHOUT}"
            )
        simple = envs.VLLM_USE_SIMPLE_KV_OFFLOAD
        return KVTransferConfig(
            kv_connector="SimpleCPUOffloadConnector" if simple else "OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"cpu_bytes_to_use": size * (1 << 30)},
        )
    if given is not None and (given.kv_connector not in _BESIDE or given.kv_role != "kv_both"):
        raise StartupError(
            f"kv-transfer-config: {given.kv_connector} with kv_role: {given.kv_role} does not go"
            f" with remote prefill: kv_connector must be one of {', '.join(_BESIDE)}, kv_role"
            f" kv_both; or {WITHOUT}"
        )
    return given
