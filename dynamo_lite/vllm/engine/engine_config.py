"""vLLM's configuration of one engine: its flags, its scheduler, and the connector."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

from dynamo_lite.disagg.engine_config import ENGINE_CONFIG_FILE, DecodeEngineConfig, EngineConfig
from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.vllm.engine.arrivals import schedule_arrivals_at_once
from dynamo_lite.vllm.engine.connector_types import CONNECTOR
from dynamo_lite.vllm.engine.kv_events import kv_events_config
from dynamo_lite.vllm.engine.short_first import let_short_pass
from dynamo_lite.vllm.engine.supported import check_config

#: Also the name of vLLM's own, see there.
_MULTI = "MultiConnector"
#: Of a child's configuration; the others are the parent's.
_CHILD = {
    *("kv_connector", "kv_connector_module_path", "kv_role", "kv_connector_extra_config"),
    *("kv_buffer_device", "kv_port", "enable_permute_local_kv"),
}


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
        args.kv_transfer_config = transfer_config(engine_config, engine_config_path, _beside(args))
    if kv_events:
        args.kv_events_config = kv_events_config()
    # The usage context chooses the same defaults as `vllm serve`.
    config = args.create_engine_config(UsageContext.OPENAI_API_SERVER)
    let_short_pass(config, engine_config)
    schedule_arrivals_at_once(config, engine_config)
    if engine_config is not None:
        check_config(config)
    return config


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
    children = [ours, {name: value for name, value in asdict(beside).items() if name in _CHILD}]
    multi = {
        "kv_connector": _MULTI,
        "kv_connector_module_path": "dynamo_lite.vllm.engine.multi_connector",
        "kv_connector_extra_config": {**ours["kv_connector_extra_config"], "connectors": children},
    }
    return KVTransferConfig(engine_id=engine_config.engine_id, **(ours | multi))


def own_counts(config: VllmConfig, counts: dict[str, Any]) -> dict[str, Any]:
    """The statistics of our connector alone. counts: those of all; by connector if there are
    several."""
    transfer = config.kv_transfer_config
    if transfer is not None and transfer.kv_connector == CONNECTOR:
        return counts
    return counts.get(CONNECTOR, {})


def _beside(args: AsyncEngineArgs) -> KVTransferConfig | None:
    """The connector that the user wants beside ours. Raises StartupError."""
    given, size = args.kv_transfer_config, args.kv_offloading_size
    if size is not None and given is not None:
        raise StartupError("kv-offloading-size and kv-transfer-config: set one of them")
    args.kv_offloading_size = None  # vLLM would replace our connector
    made = given if size is None else _offloading(args.kv_offloading_backend, size)
    if made is None:
        return None
    if made.kv_role != "kv_both":
        raise StartupError(
            f"kv-transfer-config: kv_role: {made.kv_role} does not go with remote prefill: a"
            " connector beside dynamo-lite's must save and load KV (kv_both)"
        )
    try:
        KVConnectorFactory.get_connector_class(made)
    except (ImportError, AttributeError, ValueError) as exc:
        raise StartupError(f"KV connector {made.kv_connector} cannot be loaded: {exc}") from exc
    return made


def _offloading(backend: str, size_gib: float) -> KVTransferConfig:
    """What vLLM makes of kv-offloading-size."""
    if backend == "lmcache":
        return KVTransferConfig(kv_connector="LMCacheMPConnector", kv_role="kv_both")
    name = "SimpleCPUOffloadConnector" if envs.VLLM_USE_SIMPLE_KV_OFFLOAD else "OffloadingConnector"
    return KVTransferConfig(
        kv_connector=name,
        kv_role="kv_both",
        kv_connector_extra_config={"cpu_bytes_to_use": size_gib * (1 << 30)},
    )
