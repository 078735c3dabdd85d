"""Which weight files an engine loads, and when two engines' are the same."""

import json
import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo_lite.vllm.engine.weights import digest, weights_print

MIB = 1 << 20
TENSOR = MIB // 20


def config(model: object, **other: Any) -> tuple[Any, Any]:
    """The configuration of a model, and of how it is loaded."""
    facts: dict[str, Any] = {"model_weights": "", "revision": None, "load_format": "auto", **other}
    return (
        SimpleNamespace(
            model=str(model), revision=facts["revision"], model_weights=facts["model_weights"]
        ),
        SimpleNamespace(load_format=facts["load_format"], download_dir=facts.get("download_dir")),
    )


def write(folder: Path, **files: bytes) -> Path:
    """Files are named with `__` for their dots."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_bytes(content)
    return folder


def weights(seed: int, size: int = 9 * MIB) -> bytes:
    return random.Random(seed).randbytes(size)


def test_equal_files_are_equal_wherever_and_whenever_they_were_written(tmp_path: Path):
    one = write(tmp_path / "one", model__safetensors=weights(1))
    two = write(tmp_path / "two", model__safetensors=weights(1), README__md=b"not a weight")
    os.utime(two / "model.safetensors", (1, 1))
    assert weights_print(*config(one)) == weights_print(*config(two))


@pytest.mark.parametrize("at", [0.01, 0.3, 0.5, 0.99])
def test_a_fine_tune_with_the_same_header_and_size_is_another_one(tmp_path: Path, at: float):
    """One tensor of its many was trained."""
    base = weights(1)
    start = int(len(base) * at)
    tuned = (base[:start] + weights(2, TENSOR) + base[start + TENSOR :])[: len(base)]
    one, two = (write(tmp_path / n, model__safetensors=w) for n, w in (("a", base), ("b", tuned)))
    assert (one / "model.safetensors").stat().st_size == (two / "model.safetensors").stat().st_size
    assert weights_print(*config(one)) != weights_print(*config(two))


def safetensors(path: Path, large: int, small: int, seed: int) -> None:
    """Two tensors, sizes in bytes: zeros, which take no room on the disk, and random ones."""
    spans = {"large": (0, large), "small": (large, large + small)}
    tensors = {
        name: {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
        for name, (begin, end) in spans.items()
    }
    header = json.dumps({"__metadata__": {"format": "pt"}, **tensors}).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.seek(large, os.SEEK_CUR)
        file.write(random.Random(seed).randbytes(small))


@pytest.mark.parametrize("small", [64, 20_000])
def test_each_tensor_counts_however_small(tmp_path: Path, small: int):
    prints: list[str] = []
    for name, seed in (("one", 1), ("same", 1), ("other", 2)):
        (tmp_path / name).mkdir()
        safetensors(tmp_path / name / "model.safetensors", 1 << 30, small, seed)
        prints.append(weights_print(*config(tmp_path / name)))
    one, same, other = prints
    assert one == same != other


@pytest.mark.parametrize("header", [b"\xff" * 8, (3).to_bytes(8, "little") + b"{x}", b"12"])
def test_a_header_that_cannot_be_read_is_no_crash(tmp_path: Path, header: bytes):
    one, two = (
        write(tmp_path / name, model__safetensors=header + weights(seed))
        for name, seed in (("one", 1), ("two", 2))
    )
    assert weights_print(*config(one)) != weights_print(*config(two))


@pytest.mark.parametrize(
    ("load_format", "names"),
    [
        ("auto", ["consolidated.safetensors"]),
        ("bitsandbytes", ["model-1.safetensors", "model-2.safetensors"]),
        ("npcache", ["model.bin"]),
    ],
)
def test_the_files_that_vllm_loads_are_those_that_count(
    tmp_path: Path, load_format: str, names: list[str]
):
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    folder = write(
        tmp_path / "model",
        consolidated__safetensors=b"all",
        model__bin=b"all, pickled",
        training_args__bin=b"none",
        model__safetensors__index__json=json.dumps(index).encode(),
    )
    (folder / "model-1.safetensors").write_bytes(b"first")
    (folder / "model-2.safetensors").write_bytes(b"second")
    made = weights_print(*config(folder, load_format=load_format))
    assert made == digest([folder / name for name in names])


def test_a_model_of_the_hub_is_read_from_its_snapshot(tmp_path: Path):
    store = tmp_path / "models--some--model"
    snapshot = write(store / "snapshots" / "0123abcd", model__safetensors=weights(1))
    write(store / "refs", main=b"0123abcd")
    cached = config("some/model", download_dir=str(tmp_path))
    assert weights_print(*cached) == digest([snapshot / "model.safetensors"])


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (
            {"model": "some/model", "revision": "v2"},
            "not read: some/model, revision v2 (no local files)",
        ),
        (
            {"model": "some/model", "model_weights": "s3://bucket/model"},
            "not read: s3://bucket/model, revision default (no local files)",
        ),
        (
            {"model": "FOLDER", "load_format": "sharded_state"},
            "not read: model, revision default (Unknown load_format: sharded_state)",
        ),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, facts: dict[str, Any], said: str):
    folder = write(tmp_path / "model", model__safetensors=b"123")
    name = facts.pop("model").replace("FOLDER", str(folder))
    assert weights_print(*config(name, download_dir=str(tmp_path), **facts)) == said
