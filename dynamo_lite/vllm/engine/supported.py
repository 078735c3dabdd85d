"""Which engines support remote prefill. All others are refused at their start, with a reason.

vLLM's configuration is checked before the engine's process starts. How layers keep their KV
is only known in that process: it writes the reason for a refusal to a file beside its engine
config, and its component reports it.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vllm.config import ModelConfig, VllmConfig
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from dynamo_lite.protocol.errors import DynamoLiteError, StartupError
from dynamo_lite.vllm.engine.kv_groups import specs_of

logger = logging.getLogger(__name__)

#: Kinds of KV where a block holds the KV of its tokens, and is not needed again once all tokens
#: that attend to it are computed. Their subclasses differ, so they do not count.
_SPECS = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec)

_ONE_GROUP = "set disable-hybrid-kv-cache-manager: true for both workers"
WITHOUT = "serve it without prefill workers (graphs.agg, or VllmWorker.remote-prefill: false)"
_ONE_HOST = (
    "an engine must be on one host, as its ranks read files of their component, among them until"
    " when they may write"
)


def check_config(config: VllmConfig) -> None:
    """Raises StartupError for a configuration that does not support remote prefill."""
    for applies, option, why in _unsupported_options(config):
        if applies:
            raise StartupError(f"{option} is not supported with remote prefill: {why}")
    parallel = config.parallel_config
    if parallel.data_parallel_size > 1 and config.model_config.is_moe:
        logger.warning(
            "data-parallel-size: %d with a model of experts, whose ranks compute in step: it was"
            " not tried with remote prefill; run scripts/gpu_check --only experts first",
            parallel.data_parallel_size,
        )
    if reason := _unsupported_model(config.model_config):
        raise StartupError(f"{config.model_config.model}: {reason}; {WITHOUT}")


def check_kv(kv_config: KVCacheConfig, config: VllmConfig) -> None:
    """Raises StartupError unless all layers keep KV of a known kind, attention layers in blocks of
    the engine's size."""
    groups = kv_config.kv_cache_groups
    if len(kv_config.transfer_group_ids) != len(groups) or not groups:
        raise StartupError(f"the model has KV that vLLM does not transfer, or none; {WITHOUT}")
    specs = specs_of(kv_config)
    # Layers with a state need groups.
    one = len(groups) > 1 and not any(isinstance(spec, MambaSpec) for _, spec in specs.values())
    instead = f"{_ONE_GROUP}, or {WITHOUT}" if one else WITHOUT
    for layer, (_, spec) in specs.items():
        if reason := _unsupported_layer(spec, config.cache_config.block_size):
            raise StartupError(f"layer {layer}: {reason}; {instead}")
        if isinstance(spec, MambaSpec) and config.speculative_config is not None:
            raise StartupError(
                f"speculative-config does not go with remote prefill for this model: layer {layer}"
                f" keeps a state, and drafts keep one for each of their tokens; {WITHOUT}"
            )


@contextmanager
def refusal_recorded(engine_config_file: Path) -> Iterator[None]:
    """In the engine's process: writes the reason for a refusal to a file for its component."""
    try:
        yield
    except (DynamoLiteError, ValueError) as exc:
        # On a host other than the component's the folder may not exist.
        with suppress(OSError):
            _reason_file(engine_config_file).write_text(str(exc))
        raise


@contextmanager
def refusal_reported(engine_config_file: Path) -> Iterator[None]:
    """In the component: raises the recorded reason as a StartupError if the start failed."""
    file = _reason_file(engine_config_file)
    file.unlink(missing_ok=True)
    try:
        yield
    except Exception as exc:
        if file.exists():
            raise StartupError(file.read_text()) from exc
        raise
    finally:
        file.unlink(missing_ok=True)


def _reason_file(engine_config_file: Path) -> Path:
    return engine_config_file.with_suffix(".refused")


def _unsupported_model(model: ModelConfig) -> str:
    """Why KV of a prompt's tokens is not enough to continue it elsewhere; "" if it is."""
    if model.is_encoder_decoder:
        return "each prompt has an encoder's output, which cannot be transferred"
    if model.is_attention_free:
        return "none of its layers has KV: a state alone is not transferred"
    if model.is_diffusion:
        return (
            "it is a diffusion model: it rewrites several tokens at a time, so KV from another"
            " engine may not be what it needs"
        )
    return ""


def _unsupported_layer(spec: KVCacheSpec, block_size: int) -> str:
    """Why a layer's KV is not supported; "" if it is."""
    if isinstance(spec, MambaSpec):
        return ""
    if type(spec) not in _SPECS:
        return f"KV of the kind {type(spec).__name__} cannot be transferred"
    if spec.block_size != block_size:
        return f"its blocks hold {spec.block_size} tokens, the engine's {block_size}"
    if isinstance(spec, AttentionSpec) and spec.tokens_per_state != 1:
        return f"it keeps one state for {spec.tokens_per_state} tokens"
    if isinstance(spec, FullAttentionSpec) and spec.non_causal:
        return (
            "each token of a prompt attends to later ones (prefix LM), so its KV depends on the"
            " prompt's last token, which a prefill worker does not get"
        )
    return ""


def _unsupported_options(config: VllmConfig) -> Iterator[tuple[bool, str, str]]:
    """Whether an option, or several together, is set, its name, and why it is not supported."""
    parallel, transfer = config.parallel_config, config.kv_transfer_config
    replicas, local = parallel.data_parallel_size, parallel.data_parallel_size_local
    yield (
        parallel.data_parallel_external_lb or parallel.data_parallel_hybrid_lb,
        "data-parallel-rank or data-parallel-hybrid-lb",
        "a worker runs all its data-parallel ranks; set data-parallel-size alone",
    )
    yield (
        replicas > 1 and parallel.data_parallel_backend != "mp",
        f"data-parallel-backend: {parallel.data_parallel_backend}",
        "ranks must be processes of their component; remove it",
    )
    yield (
        parallel.enable_elastic_ep,
        "enable-elastic-ep",
        "the number of a worker's ranks is fixed; remove it",
    )
    yield (
        parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
        "decode-context-parallel-size or prefill-context-parallel-size > 1",
        "the tokens of one block would lie on several ranks",
    )
    yield parallel.nnodes > 1, f"nnodes: {parallel.nnodes}", _ONE_HOST
    yield local < replicas, f"data-parallel-size-local: {local} of {replicas}", _ONE_HOST
    # A CPU counts as one device, for any number of ranks.
    if parallel.use_ray and not current_platform.is_cpu():
        devices = current_platform.device_count()  # pyright: ignore[reportOptionalCall]
        ranks = f"{parallel.world_size} ranks, and {devices} devices on this host,"
        yield (
            parallel.world_size > devices,
            f"distributed-executor-backend: ray with {ranks}",
            _ONE_HOST,
        )
    # With drafts vLLM's V1 model runner calls `wait_for_save` in the last stage only.
    stages, writes = parallel.pipeline_parallel_size, transfer and transfer.is_kv_producer
    yield (
        bool(stages > 1 and config.speculative_config and writes)
        and not config.use_v2_model_runner,
        f"pipeline-parallel-size: {stages} with speculative-config",
        "with vLLM's V1 model runner only the last stage of a prefill worker would write its KV;"
        " remove one of them",
    )
    ahead = config.num_prefill_lookahead_tokens
    yield (
        ahead > 2,
        f"speculative-config: drafts that read {ahead} tokens ahead",
        "a prefill worker does not get the prompt's last token; at most 2 tokens"
        " (num_speculative_tokens) go",
    )
