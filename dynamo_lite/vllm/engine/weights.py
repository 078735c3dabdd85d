"""Identifies the weights that an engine has loaded, as text; equal weights have equal texts."""

import logging
import os
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import msgspec
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from vllm.config import LoadConfig, ModelConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

logger = logging.getLogger(__name__)

#: Formats of loaders that take the same files as vLLM's default one does in another.
_FILES_AS = {"bitsandbytes": "hf", "runai_streamer": "safetensors"}

_HEAD_BYTES, _SAMPLE_BYTES, _SAMPLES = 64 << 10, 4 << 10, 1024
#: Of a safetensors file: the length of its header, and the longest that the format allows.
_LENGTH_BYTES, _LONGEST_HEADER = 8, 100_000_000


def weights_print(model: ModelConfig, load: LoadConfig) -> str:
    """Returns a hash of the loaded files, or the model's name and why they were not read.

    Call it when the engine is up: a model of the hub must have been downloaded. On a local disk it
    takes milliseconds, and up to a second with tens of thousands of tensors.
    """
    name = model.model_weights or model.model
    try:
        if (path := _local_path(name, model.revision, load.download_dir)) is not None:
            name = path.name  # its folder may differ between hosts
            return digest([path] if path.is_file() else _files(path, str(load.load_format)))
        reason = "no local files"
    except (OSError, RuntimeError, ValueError) as exc:
        reason = str(exc)
    logger.warning("the weights of %s are compared by name and revision only: %s", name, reason)
    return f"not read: {name}, revision {model.revision or 'default'} ({reason})"


def digest(files: Sequence[Path]) -> str:
    """Hashes names and sizes, the beginning of each file, samples spread over all of them, and a
    sample of each tensor of a safetensors file.

    The beginning of a safetensors file lists its tensors. The samples distinguish fine-tunes,
    whose tensors have the same names and sizes.
    """
    found = blake2b(digest_size=16)
    every = max(sum(path.stat().st_size for path in files) // _SAMPLES, _SAMPLE_BYTES)
    for path in sorted(files, key=lambda path: path.name):
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            found.update(msgspec.json.encode((path.name, size)))
            found.update(os.pread(file.fileno(), _HEAD_BYTES, 0))
            for at in (*range(_HEAD_BYTES, size, every), *_tensors(file.fileno(), size)):
                found.update(os.pread(file.fileno(), _SAMPLE_BYTES, at))
    return found.hexdigest()


def _tensors(file: int, size: int) -> list[int]:
    """Where samples in the middle of each tensor begin, if it is a safetensors file: the length of
    its header in eight bytes, the header in JSON, and the tensors
    (https://github.com/huggingface/safetensors#format)."""
    length = int.from_bytes(os.pread(file, _LENGTH_BYTES, 0), "little")
    if length > min(size - _LENGTH_BYTES, _LONGEST_HEADER):
        return []
    try:
        header = msgspec.json.decode(
            os.pread(file, length, _LENGTH_BYTES), type=dict[str, _HeaderEntry]
        )
    except msgspec.DecodeError:
        return []
    spans = sorted(entry.data_offsets for entry in header.values() if entry.data_offsets)
    first = _LENGTH_BYTES + length
    return [first + max(begin, (begin + end - _SAMPLE_BYTES) // 2) for begin, end in spans]


def _local_path(model: str, revision: str | None, cache: str | None) -> Path | None:
    """A model's local file or folder, for a model of the hub its snapshot; None without one."""
    path = Path(model)
    if path.exists():
        return path
    try:
        return Path(
            snapshot_download(model, revision=revision, cache_dir=cache, local_files_only=True)
        )
    except (HFValidationError, LocalEntryNotFoundError):
        return None


def _files(folder: Path, load_format: str) -> list[Path]:
    """Those that vLLM loads. Raises OSError, RuntimeError or ValueError if there are none, or their
    index is broken."""
    loader = DefaultModelLoader(LoadConfig(load_format=_FILES_AS.get(load_format, load_format)))
    _, files, *_ = loader._prepare_weights(
        str(folder), None, None, fall_back_to_pt=True, allow_patterns_overrides=None
    )
    return [Path(file) for file in files]


class _HeaderEntry(msgspec.Struct):
    """Of one tensor: its first byte and the one after its last, after the header. The entry
    `__metadata__` has none."""

    data_offsets: tuple[int, int] | None = None
