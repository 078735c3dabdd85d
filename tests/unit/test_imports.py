"""Large imports in a thread: the garbage collector is off during them, and on again afterwards."""

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamo_lite.runtime.process.imports import import_in_thread


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module that says whether the collector was on during its import."""
    (tmp_path / "a_large_module.py").write_text("import gc\nCOLLECTS = gc.isenabled()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "a_large_module"
    sys.modules.pop("a_large_module", None)
    gc.unfreeze()


async def test_nothing_is_collected_during_an_import(large: str):
    await import_in_thread(large)
    assert sys.modules[large].COLLECTS is False
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0


async def test_the_collector_is_on_after_an_import_that_fails(large: str):
    with pytest.raises(ModuleNotFoundError):
        await import_in_thread(f"{large}_that_is_not_there")
    assert gc.isenabled()
