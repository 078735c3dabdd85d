"""Which engines support remote prefills, and the reasons for which the others are refused."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from dynamo_lite.disagg.engine_config import read_engine_config
from dynamo_lite.protocol.errors import ProtocolError, StartupError
from dynamo_lite.vllm.engine import supported
from dynamo_lite.vllm.engine.supported import (
    check_config,
    check_kv,
    refusal_recorded,
    refusal_reported,
)

BLOCK = 32
SHAPE: dict[str, Any] = {
    "block_size": BLOCK,
    "num_kv_heads": 2,
    "head_size": 64,
    "dtype": torch.bfloat16,
}
FULL, WINDOW = FullAttentionSpec(**SHAPE), SlidingWindowSpec(**SHAPE, sliding_window=128)
DRAFTS_IN_STAGES = {"parallel": {"pipeline_parallel_size": 2}, "speculative_config": "ngram"}
ODD = ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=64)
MAMBA = MambaSpec(block_size=BLOCK, shapes=((4, 4),), dtypes=(torch.float32,))


def kv(*specs: KVCacheSpec) -> KVCacheConfig:
    groups = [
        KVCacheGroupSpec([*getattr(spec, "kv_cache_specs", [f"layer{i}"])], spec)
        for i, spec in enumerate(specs)
    ]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


def engine(*, drafts: Any = None) -> Any:
    cache = SimpleNamespace(block_size=BLOCK)
    return SimpleNamespace(cache_config=cache, speculative_config=drafts)


def uniform(**specs: KVCacheSpec) -> UniformTypeKVCacheSpecs:
    return UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs=specs)


@pytest.mark.parametrize(
    "spec",
    [
        FULL,
        WINDOW,
        FullAttentionSpec(**SHAPE, sliding_window=128),
        FullAttentionSpec(**{**SHAPE, "dtype": torch.uint8}),
        MLAAttentionSpec(**{**SHAPE, "num_kv_heads": 1, "head_size": 576}),
        uniform(a=FULL, b=FullAttentionSpec(**{**SHAPE, "head_size": 128})),
    ],
    ids=["full", "window", "mixed", "one byte", "MLA", "sizes"],
)
def test_kv_in_blocks_of_tokens_is_handed_over(spec):
    check_kv(kv(spec), engine())
    check_kv(kv(spec, WINDOW, MAMBA), engine())


@pytest.mark.parametrize(
    ("specs", "reason"),
    [
        ([], "the model has KV that vLLM does not transfer, or none"),
        ([FULL, ODD], "layer layer1: KV of the kind ChunkedLocalAttention"),
        ([ODD], "ChunkedLocalAttention"),
        ([FullAttentionSpec(**{**SHAPE, "block_size": 64})], "blocks hold 64 tokens, the engine's"),
        ([FullAttentionSpec(**SHAPE, tokens_per_state=4)], "one state for 4 tokens"),
        ([FullAttentionSpec(**SHAPE, non_causal=True)], "(prefix LM)"),
        ([uniform(a=FULL, b=FullAttentionSpec(**SHAPE, non_causal=True))], "layer b: each token"),
        ([uniform(a=FULL, odd=ODD)], "layer odd: KV of the kind ChunkedLocalAttention"),
    ],
)
def test_other_kv_is_refused_with_the_reason(specs, reason):
    with pytest.raises(StartupError, match=re.escape(reason)):
        check_kv(kv(*specs), engine())


def test_where_one_group_may_help_it_is_named():
    """As where full attention has larger heads: vLLM gives its group blocks of fewer tokens."""
    other = FullAttentionSpec(**{**SHAPE, "block_size": 64})
    with pytest.raises(StartupError, match=r"64 tokens.*disable-hybrid-kv-cache-manager: true"):
        check_kv(kv(WINDOW, other), engine())


def test_drafts_of_a_model_with_states_are_refused():
    with pytest.raises(StartupError, match=r"speculative-config .* layer layer1 keeps a state"):
        check_kv(kv(FULL, MAMBA), engine(drafts="ngram"))
    check_kv(kv(FULL, WINDOW), engine(drafts="ngram"))


BALANCED_ELSEWHERE = ("data_parallel_external_lb", "data_parallel_hybrid_lb")


def config(*, model: Any = None, parallel: Any = None, **more: Any) -> Any:
    """Of an engine that writes, on vLLM's V1 model runner."""
    flags = "is_encoder_decoder is_hybrid is_attention_free has_inner_state is_diffusion is_moe"
    sizes = (
        "data_parallel_size decode_context_parallel_size prefill_context_parallel_size nnodes"
        " data_parallel_size_local pipeline_parallel_size world_size"
    )
    parts = {
        "model_config": {"model": "some/model", **dict.fromkeys(flags.split(), False)},
        "parallel_config": {
            **dict.fromkeys(sizes.split(), 1),
            **dict.fromkeys((*BALANCED_ELSEWHERE, "use_ray", "enable_elastic_ep"), False),
            "data_parallel_backend": "mp",
        },
        "kv_transfer_config": {"is_kv_producer": True},
    }
    given = {"model_config": model, "parallel_config": parallel}
    made = {
        name: SimpleNamespace(**(part | (given.get(name) or {}))) for name, part in parts.items()
    }
    return SimpleNamespace(
        **{**made, "speculative_config": None, "use_v2_model_runner": False}
        | {"num_prefill_lookahead_tokens": 0, **more}
    )


def test_ordinary_engines_are_supported():
    check_config(config())
    check_config(config(**DRAFTS_IN_STAGES | {"speculative_config": None}))
    check_config(config(**DRAFTS_IN_STAGES, use_v2_model_runner=True))
    check_config(config(num_prefill_lookahead_tokens=2))
    reads = SimpleNamespace(is_kv_producer=False)
    check_config(config(**DRAFTS_IN_STAGES, kv_transfer_config=reads))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"model": {"is_attention_free": True}}, "some/model: none of its layers has KV"),
        ({"model": {"is_encoder_decoder": True}}, "some/model: each prompt has an encoder's"),
        ({"model": {"is_diffusion": True}}, "some/model: it is a diffusion model"),
        *(({"parallel": {key: True}}, "data-parallel-size alone") for key in BALANCED_ELSEWHERE),
        ({"parallel": {"decode_context_parallel_size": 2}}, "decode-context-parallel-size"),
        ({"parallel": {"prefill_context_parallel_size": 2}}, "prefill-context-parallel-size"),
        ({"parallel": {"nnodes": 2}}, "nnodes: 2 is not supported"),
        ({"parallel": {"data_parallel_size": 2}}, "data-parallel-size-local: 1 of 2"),
        ({"parallel": {"data_parallel_size": 2, "data_parallel_backend": "ray"}}, "backend: ray"),
        ({"parallel": {"enable_elastic_ep": True}}, "enable-elastic-ep is not"),
        (DRAFTS_IN_STAGES, "pipeline-parallel-size: 2 with speculative-config"),
        ({"num_prefill_lookahead_tokens": 3}, "drafts that read 3 tokens ahead"),
    ],
)
def test_what_cannot_be_handed_over_is_refused_before_the_engine_starts(changed, reason):
    with pytest.raises(StartupError, match=re.escape(reason)):
        check_config(config(**changed))


def test_data_parallel_ranks_of_a_model_with_experts_are_warned_about(caplog):
    ranks = {"data_parallel_size": 2, "data_parallel_size_local": 2}
    check_config(config(parallel=ranks))
    assert not caplog.records
    check_config(config(parallel=ranks, model={"is_moe": True}))
    assert "data-parallel-size: 2 with a model of experts" in caplog.text


def test_ranks_that_ray_would_put_on_another_host_are_refused(monkeypatch: pytest.MonkeyPatch):
    gpus = SimpleNamespace(is_cpu=lambda: False, device_count=lambda: 4)
    monkeypatch.setattr(supported, "current_platform", gpus)
    check_config(config(parallel={"use_ray": True, "world_size": 4}))
    check_config(config(parallel={"world_size": 8}))
    with pytest.raises(StartupError, match="8 ranks, and 4 devices on this host"):
        check_config(config(parallel={"use_ray": True, "world_size": 8}))


@pytest.mark.parametrize(
    "why", [StartupError("no such KV"), ProtocolError("no file"), ValueError("layer 1: not dense")]
)
def test_the_component_hears_why_its_engine_gave_up(tmp_path: Path, why: Exception):
    config_file = tmp_path / "PrefillWorker-0.engine.json"
    with pytest.raises(StartupError, match=str(why)), refusal_reported(config_file):
        with pytest.raises(type(why)), refusal_recorded(config_file):
            raise why
        raise RuntimeError("Engine core initialization failed")
    assert list(tmp_path.iterdir()) == []


def test_other_ends_are_reported_as_they_are_whatever_an_earlier_start_has_left(tmp_path: Path):
    config_file = tmp_path / "PrefillWorker-0.engine.json"
    with pytest.raises(ValueError, match="old"), refusal_recorded(config_file):
        raise ValueError("old")
    with pytest.raises(RuntimeError, match="out of memory"), refusal_reported(config_file):
        raise RuntimeError("out of memory")


def test_a_rank_that_cannot_read_its_configuration_says_where_and_why(tmp_path: Path):
    config_file = tmp_path / "VllmWorker-0.engine.json"
    with (
        pytest.raises(StartupError, match="must be on the host of its component"),
        refusal_reported(config_file),
    ):
        with (
            pytest.raises(StartupError, match=f"{config_file}: No such file"),
            refusal_recorded(config_file),
        ):
            read_engine_config(str(config_file))
        raise RuntimeError("Engine core initialization failed")


def test_the_reason_is_raised_also_where_it_cannot_be_left(tmp_path: Path):
    """On another host there is no folder for it."""
    with (
        pytest.raises(StartupError, match="cannot read its configuration"),
        refusal_recorded(config_file := tmp_path / "elsewhere" / "VllmWorker-0.engine.json"),
    ):
        read_engine_config(str(config_file))
