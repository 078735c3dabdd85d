"""Large imports in a thread: the garbage collector is off during them, and on again afterwards."""

import asyncio
import gc
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamo_lite.runtime.process import imports
from dynamo_lite.runtime.process.imports import import_large


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module that says whether the collector was on during its import."""
    (tmp_path / "a_large_module.py").write_text("import gc\nCOLLECTS = gc.isenabled()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "a_large_module"
    sys.modules.pop("a_large_module", None)
    gc.unfreeze()


async def test_the_collector_is_off_during_an_import_only_and_the_first_one_is_exempt(large: str):
    await asyncio.to_thread(import_large, large)
    assert sys.modules[large].COLLECTS is False
    assert gc.isenabled() and gc.get_freeze_count() > 0
    with pytest.raises(ModuleNotFoundError):
        await asyncio.to_thread(import_large, f"{large}_that_is_not_there")
    assert gc.isenabled()
    gc.unfreeze()
    await asyncio.to_thread(import_large, large)
    assert gc.get_freeze_count() == 0


def test_a_process_that_an_engine_spawns_imports_vllm_first(monkeypatch):
    """As `multiprocessing.spawn` runs its parent's main module."""
    imported: list[str] = []
    monkeypatch.setattr(imports, "import_large", imported.append)
    monkeypatch.delitem(sys.modules, "dynamo_lite.serve.child", raising=False)
    runpy.run_module("dynamo_lite.serve.child", run_name="__mp_main__", alter_sys=True)
    assert imported == ["vllm.v1.engine.core"]
