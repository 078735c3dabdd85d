"""The fence: open only while the lease certainly lives, with no message needed."""

import pytest

from dynamo_lite.runtime import fence as fence_module
from dynamo_lite.runtime.fence import FenceHolder, FenceReader


@pytest.fixture
def fence(tmp_path, monkeypatch):
    clock = [5000.0]
    monkeypatch.setattr(fence_module, "boottime", lambda: clock[0])
    holder = FenceHolder(tmp_path / "fence")
    reader = FenceReader(tmp_path / "fence")
    yield holder, reader, clock
    reader.close()


def test_it_is_open_until_the_deadline_however_silent_the_holder_is(fence):
    holder, reader, clock = fence
    assert not reader.open()
    holder.open_until(clock[0] + 10.0)
    clock[0] += 9.999
    assert reader.open()
    clock[0] += 0.001
    assert not reader.open()


@pytest.mark.parametrize("remaining", [1.0, 0.0, -3.0])
def test_each_deadline_takes_the_place_of_the_one_before(fence, remaining):
    holder, reader, clock = fence
    holder.open_until(clock[0] + 10.0)
    clock[0] += 8.0
    holder.open_until(clock[0] + 10.0)
    clock[0] += 8.0
    assert reader.open()
    holder.open_until(clock[0] + remaining)
    clock[0] += max(remaining, 0.0)
    assert not reader.open()


def test_closing_fences_readers_that_still_look_and_removes_the_file(fence):
    holder, reader, clock = fence
    holder.open_until(clock[0] + 10.0)
    holder.close()
    assert not reader.open()
    assert not holder.path.exists()


def test_a_missing_fence_is_an_error_and_not_an_open_one(tmp_path):
    with pytest.raises(FileNotFoundError):
        FenceReader(tmp_path / "none")
