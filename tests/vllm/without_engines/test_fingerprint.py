"""Who may write into whom, before anything is computed."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig, VllmConfig

from dynamo_lite.protocol.errors import IncompatiblePeer
from dynamo_lite.protocol.records import EngineMetadata
from dynamo_lite.vllm.engine.fingerprint import check_peer, fingerprint
from tests.shards import Shape, ShardedEngine
from tests.twins.mover import MemoryFabric, MemoryMover
from tests.vllm.front_half import write_model

ONE = Shape()
SAME = {"model": "tiny", "block_size": "32", "kv_layout": "heads of [32, 64]/[64, 1]"}


def engine(name: str, shape: Shape = ONE, **changed: str) -> EngineMetadata:
    """changed: of its fingerprint."""
    fabric = MemoryFabric()
    ranks = range(shape.tensor * shape.pipeline)
    movers = {rank: MemoryMover(fabric, f"{name}{rank}") for rank in ranks}
    return EngineMetadata(
        engine_id=name,
        lease_id=1,
        fingerprint={**SAME, **changed},
        block_size_tokens=shape.tokens,
        num_blocks=4,
        ranks=tuple(ShardedEngine(shape, 4, 4, movers, truth=False).ranks),
    )


@pytest.mark.parametrize("shape", [Shape(tensor=2), Shape(tensor=4), Shape(pipeline=2)])
def test_engines_may_differ_in_how_they_are_spread(shape):
    assert check_peer(engine("p", shape), engine("d"))
    assert check_peer(engine("p"), engine("d", shape))


@pytest.mark.parametrize("opaque", [True, False])
def test_a_difference_is_named_with_both_values(opaque):
    shape = Shape(opaque=opaque)
    with pytest.raises(IncompatiblePeer, match="model: 'tiny' here, 'other' there"):
        check_peer(engine("p", shape), engine("d", shape, model="other"))


DIFFERENT = [
    pytest.param(Shape(tokens=64), {"block_size": "64"}, id="block size"),
    pytest.param(Shape(heads_first=False), {"kv_layout": "[32, 4 heads, 64]"}, id="layout"),
    pytest.param(
        Shape(tensor=2, pipeline=2, tokens=64, heads_first=False),
        {"block_size": "64", "kv_layout": "[64, 2 heads, 64]"},
        id="all",
    ),
]


@pytest.mark.parametrize(("shape", "changed"), DIFFERENT)
def test_blocks_may_differ_where_both_sides_know_their_order(shape, changed):
    assert not check_peer(engine("p"), engine("d", shape, **changed))


@pytest.mark.parametrize(("shape", "changed"), DIFFERENT)
@pytest.mark.parametrize("unknown", ["here", "there"])
def test_blocks_that_differ_in_an_unknown_order_are_refused(shape, changed, unknown):
    theirs = replace(shape, opaque=unknown == "there")
    name, value = next(iter(changed.items()))
    words = re.escape(f"{name}: {SAME[name]!r} here, {value!r} there")
    with pytest.raises(IncompatiblePeer, match=f"{words}.*layer 0.*is not known on both sides"):
        check_peer(engine("p", Shape(opaque=unknown == "here")), engine("d", theirs, **changed))


def test_blocks_that_differ_and_cannot_be_laid_out_are_refused_with_all_differences():
    """Half of the heads of each token: no run of bytes that a writer of its own can bring."""
    theirs = Shape(tokens=64, heads_first=False)
    with pytest.raises(IncompatiblePeer, match=r"block_size: '32' here, '64' there; .*be cut"):
        check_peer(engine("p", Shape(tensor=2)), engine("d", theirs, block_size="64"))


def test_values_of_another_size_are_refused():
    changed = {"kv_cache_dtype": "fp8"}
    with pytest.raises(IncompatiblePeer, match="kv_cache_dtype: None here, 'fp8' there"):
        check_peer(engine("p"), engine("d", Shape(dtype=np.uint8), **changed))


def test_layers_of_a_draft_model_on_one_side_are_refused():
    """EAGLE or MTP on the decode side alone: nobody would write that KV."""
    target = engine("d")
    [rank] = target.ranks
    last = rank.regions[-1]
    draft = msgspec.structs.replace(last, layer="draft", base=last.base + (1 << 30))
    rank = msgspec.structs.replace(rank, regions=(*rank.regions, draft))
    drafting = msgspec.structs.replace(target, ranks=(rank,))
    with pytest.raises(IncompatiblePeer, match="draft"):
        check_peer(engine("p"), drafting)


def test_ranks_that_do_not_fit_are_refused_with_what_each_side_has():
    mine, theirs = (
        Shape(heads_first=False, opaque=True),
        Shape(tensor=2, heads_first=False, opaque=True),
    )
    with pytest.raises(IncompatiblePeer, match=r"its rank 0 \(.*cannot be cut.*here \(rank 0"):
        check_peer(engine("p", mine), engine("d", theirs))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two folders of one name with the same model, which a test may change."""
    base = tmp_path_factory.mktemp("models")
    for host in ("one", "two"):
        folder = write_model(base / host / "llama")
        (folder / "model.safetensors").write_bytes(b"weights")
    return base


def printed(models: Path, host: str = "one", **given: Any) -> dict[str, str]:
    model = ModelConfig(
        model=str(models / host / "llama"), **{"max_model_len": 512, "dtype": "bfloat16", **given}
    )
    return fingerprint(VllmConfig(model_config=model), {})


def changed(models: Path, **given: Any) -> set[str]:
    """What differs between the model as it is, and with `given`."""
    plain, other = printed(models), printed(models, **given)
    return {name for name in plain if plain[name] != other[name]}


def test_the_same_model_on_two_hosts_has_one_fingerprint(models: Path):
    assert changed(models, host="two") == set()


def test_a_configuration_counts_without_what_only_says_where_it_is_from(models: Path):
    file = models / "two" / "llama" / "config.json"
    written = json.loads(file.read_text())
    try:
        other = {"transformers_version": "1.0", "_name_or_path": "/old/path", "dtype": "float32"}
        file.write_text(json.dumps({**written, **other}))
        assert changed(models, host="two") == set()
        file.write_text(json.dumps({**written, "rms_norm_eps": 0.5}))
        assert changed(models, host="two") == {"config"}
    finally:
        file.write_text(json.dumps(written))


SCALED = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"hf_overrides": {"rope_parameters": SCALED}}, {"config"}),
        ({"hf_overrides": {"rms_norm_eps": 0.5}}, {"config"}),
        ({"max_model_len": 256}, {"max_model_len"}),
        ({"dtype": "float32"}, {"dtype"}),
        ({"quantization": "fp8"}, {"quantization"}),
    ],
    ids=["rope", "config", "length", "dtype", "quantization"],
)
def test_what_makes_other_kv_is_in_the_fingerprint(models: Path, given: dict, names: set[str]):
    assert changed(models, **given) == names


def test_a_model_counts_with_the_length_with_which_it_was_loaded(models: Path):
    """An engine may shorten it later, to what fits into its memory."""
    model = ModelConfig(model=str(models / "one" / "llama"), max_model_len=256)
    made = fingerprint(VllmConfig(model_config=model), {}, max_model_len=512)
    assert made["max_model_len"] == "512"


@pytest.mark.parametrize(("window", "more"), [(None, set()), (128, {"window_block_size"})])
def test_block_sizes_are_compared_where_a_window_frees_blocks(models: Path, window, more):
    config = VllmConfig(model_config=ModelConfig(model=str(models / "one" / "llama")))
    cache = config.cache_config
    cache.sliding_window, cache.block_size = window, 32
    small, cache.block_size = fingerprint(config, {}), 64
    large = fingerprint(config, {})
    assert {name for name in small if small[name] != large[name]} == {"block_size"} | more


def test_other_weights_in_a_folder_of_the_same_name_are_refused(models: Path):
    weights = models / "two" / "llama" / "model.safetensors"
    try:
        weights.write_bytes(b"WEIGHTS")
        ours, theirs = printed(models), printed(models, host="two")
    finally:
        weights.write_bytes(b"weights")
    own, peer = (
        msgspec.structs.replace(engine(name), fingerprint=made)
        for name, made in (("p", ours), ("d", theirs))
    )
    words = f"weights: {ours['weights']!r} here, {theirs['weights']!r} there"
    with pytest.raises(IncompatiblePeer, match=f"^.*{re.escape(words)}$"):
        check_peer(own, peer)


@pytest.fixture(scope="module")
def drafts(models: Path) -> Path:
    """Two folders of one name with the same draft of one layer."""
    for host in ("one", "two"):
        folder = write_model(models / host / "draft")
        (folder / "model.safetensors").write_bytes(b"draft")
    return models


def drafted(folder: Path, **given: Any) -> str:
    """What the fingerprint says of drafts."""
    target = ModelConfig(model=str(folder / "llama"), max_model_len=512, dtype="bfloat16")
    model = str(folder / "draft")
    made: dict[str, Any] = {"method": "draft_model", "model": model, "num_speculative_tokens": 2}
    config = SpeculativeConfig(
        **{**made, **given}, target_model_config=target, target_parallel_config=ParallelConfig()
    )
    return fingerprint(VllmConfig(model_config=target, speculative_config=config), {})[
        "speculation"
    ]


def test_drafts_with_kv_of_their_own_are_compared_with_their_weights(drafts: Path):
    ours = drafted(drafts / "one")
    assert drafted(drafts / "two") == ours
    assert drafted(drafts / "two", num_speculative_tokens=1) == ours
    assert drafted(drafts / "two", kv_cache_dtype="fp8") != ours
    (drafts / "two" / "draft" / "model.safetensors").write_bytes(b"DRAFT")
    assert drafted(drafts / "two") != ours


def test_drafts_without_kv_may_be_on_one_side_only(drafts: Path):
    assert drafted(drafts / "one", method="ngram", model=None) == ""
    assert printed(drafts)["speculation"] == ""
