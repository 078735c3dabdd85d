"""Gathered reads give the same bytes as reads one by one, whatever is asked of which storage."""

import ctypes

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_lite.protocol.records import KvRegion
from dynamo_lite.transfer.digest import checksum, read_dram
from dynamo_lite.vllm.engine.device_reads import GatheredReads, memory_reader

STORAGES = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in (1 << 12, 1 << 10, 100)]


def one_by_one(spans: list[tuple[int, int]]) -> bytes:
    return b"".join(ctypes.string_at(address, length) for address, length in spans)


def gathered(**options: int) -> GatheredReads:
    return GatheredReads([tensor.untyped_storage() for tensor in STORAGES], **options)


@st.composite
def span_lists(draw) -> list[tuple[int, int]]:
    """Of any address, and often of one size, as blocks are."""
    spans: list[tuple[int, int]] = []
    sizes = draw(st.lists(st.integers(1, 64), min_size=1, max_size=3))
    for _ in range(draw(st.integers(1, 30))):
        tensor = draw(st.sampled_from(STORAGES))
        length = draw(st.sampled_from(sizes))
        at = draw(st.integers(0, tensor.numel() - length))
        spans.append((tensor.data_ptr() + at, length))
    return spans


@settings(max_examples=150, deadline=None)
@given(spans=span_lists(), limit=st.sampled_from([1, 64, 200, 1 << 20]))
def test_any_spans_are_read_in_their_order(spans, limit):
    assert b"".join(gathered(gather_bytes=limit)(spans)) == one_by_one(spans)


def test_a_device_without_spare_memory_is_read_span_by_span(monkeypatch):
    def full(self, base, length, addresses):
        raise torch.OutOfMemoryError("no memory to gather into")

    monkeypatch.setattr(GatheredReads, "_rows", full)
    spans = [(tensor.data_ptr() + 7, 40) for tensor in STORAGES]
    assert b"".join(gathered()(spans)) == one_by_one(spans)


def test_spans_of_nothing_are_nothing():
    assert b"".join(gathered()([])) == b""


@pytest.mark.parametrize("layers_apart", [False, True])
def test_a_commit_is_one_gather_per_storage_and_its_checksum_the_same(layers_apart, monkeypatch):
    """Of the last blocks too, behind which the storage ends."""
    blocks, layers, block_bytes = 16, 4, 48
    size = blocks * block_bytes
    pools = [
        torch.randint(0, 256, (size if layers_apart else layers * size,), dtype=torch.uint8)
        for _ in range(layers if layers_apart else 1)
    ]
    bases = [pool.data_ptr() for pool in pools]
    if not layers_apart:
        bases = [bases[0] + layer * size for layer in range(layers)]
    regions = [
        KvRegion(
            layer=str(layer),
            plane=0,
            base=base,
            stride_bytes=block_bytes,
            block_bytes=block_bytes,
        )
        for layer, base in enumerate(bases)
    ]
    reads = GatheredReads([pool.untyped_storage() for pool in pools])
    gathers: list[int] = []
    rows = reads._rows
    monkeypatch.setattr(reads, "_rows", lambda *args: gathers.append(len(args[2])) or rows(*args))
    ids = [15, 3, 4, 0, 9]
    assert checksum(regions, ids, reads, 7) == checksum(regions, ids, read_dram, 7)
    assert gathers == ([5] * layers if layers_apart else [5 * layers])


def test_memory_of_a_cpu_is_read_in_place():
    assert memory_reader([STORAGES[0].untyped_storage()]) is read_dram


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_is_read_on_a_stream_of_its_own():
    tensor = STORAGES[0].cuda()
    spans = [(tensor.data_ptr() + at, 128) for at in (0, 512, 256)]
    read = memory_reader([tensor.untyped_storage()])
    torch.cuda._sleep(1 << 30)
    busy = torch.cuda.Event()
    busy.record()
    found = b"".join(read(spans))
    assert not busy.query(), "it did not wait for the current stream"
    assert found == b"".join(tensor.cpu()[at : at + 128].numpy().tobytes() for at in (0, 512, 256))
