"""Claim cells: open while the claim holds, with no message needed, and never for another claim."""

import os
import stat
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo_lite.runtime.claim_cells import Cell, CellReader, ClaimCells
from dynamo_lite.serve.services.config import PrefillWorkerConfig
from dynamo_lite.serve.services.vllm_backend import VllmBackend
from tests.unit.process_run import Run

NOW = 5000.0


def test_a_cell_is_shut_until_its_claim_is_held_and_holds_until_the_last_answer_says():
    cells = ClaimCells(2)
    opened = cells.open(7)
    assert cells.read(opened.cell) == 0.0
    for until in (NOW, NOW + 2.0, NOW + 1.0):
        opened.hold_until(until)
        assert cells.read(opened.cell) == until
    opened.hold_until(0.0)
    assert cells.read(opened.cell) == 0.0


def test_a_time_is_never_rounded_up():
    cells = ClaimCells(1)
    opened = cells.open(7)
    opened.hold_until(NOW + 0.1 + 1e-10)
    assert cells.read(opened.cell) <= NOW + 0.1 + 1e-10


def test_a_cell_that_is_used_again_does_not_open_for_the_claim_before():
    cells = ClaimCells(1)
    first = cells.open(7)
    first.hold_until(NOW)
    first.free()
    assert cells.read(first.cell) == 0.0
    second = cells.open(8)
    assert second.cell.index == first.cell.index
    assert cells.read(second.cell) == 0.0, "the time of the claim before does not hold for it"
    second.hold_until(NOW)
    assert (cells.read(first.cell), cells.read(second.cell)) == (0.0, NOW)
    # What comes late of the first one changes nothing.
    first.hold_until(NOW + 9.0)
    first.hold_until(0.0)
    first.free()
    assert (cells.read(first.cell), cells.read(second.cell)) == (0.0, NOW)


@pytest.mark.parametrize("cell", [Cell(), Cell(0, 8), Cell(2, 7), Cell(1000, 7), Cell(0, 0)])
def test_a_cell_that_was_not_opened_is_shut(cell: Cell):
    cells = ClaimCells(2)
    others = [cells.open(7), cells.open(9)]
    [mine] = [each for each in others if each.cell.index == 0]
    mine.hold_until(NOW)
    assert cells.read(cell) == (NOW if cell == mine.cell else 0.0)


def test_no_cell_is_used_twice_at_a_time():
    cells = ClaimCells(2)
    assert len({cells.open(claim).cell.index for claim in (1, 2)}) == 2
    with pytest.raises(RuntimeError, match="more claims than cells"):
        cells.open(3)


def test_another_process_reads_them_in_the_file(tmp_path: Path):
    cells = ClaimCells(3, tmp_path / "claims")
    reader = CellReader(tmp_path / "claims")
    assert stat.S_IMODE((tmp_path / "claims").stat().st_mode) == 0o600
    opened = [cells.open(claim) for claim in (7, 8, (1 << 63) - 1)]
    assert [reader.until(each.cell) for each in opened] == [0.0] * 3
    for number, each in enumerate(opened):
        each.hold_until(NOW + number)
    assert [reader.until(each.cell) for each in opened] == [NOW, NOW + 1, NOW + 2]
    opened[1].hold_until(0.0)
    assert [reader.until(each.cell) for each in opened] == [NOW, 0.0, NOW + 2]
    reader.close()
    cells.close()


def test_closing_shuts_all_cells_for_readers_that_still_look_and_removes_the_file(tmp_path: Path):
    cells = ClaimCells(1, tmp_path / "claims")
    reader = CellReader(tmp_path / "claims")
    opened = cells.open(7)
    opened.hold_until(NOW)
    cells.close()
    assert reader.until(opened.cell) == cells.read(opened.cell) == 0.0
    assert not (tmp_path / "claims").exists()
    # A job may end after that.
    opened.hold_until(NOW)
    opened.free()
    assert reader.until(opened.cell) == 0.0
    reader.close()


def test_a_missing_file_is_an_error_and_not_an_open_cell(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        CellReader(tmp_path / "none")


def test_a_worker_and_the_last_one_of_its_number_share_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The last one drains after the death of its supervisor. What dead ones have left is removed,
    but not of another number."""
    host: Any = SimpleNamespace(spec=Run(state_dir=str(tmp_path)).spec)
    backend = VllmBackend()
    dead = subprocess.Popen("true")
    dead.wait()
    (tmp_path / "run").mkdir()
    left, other = (tmp_path / "run" / f"Worker-{n}-{dead.pid}.engine.json" for n in (0, 10))
    left.touch()
    other.touch()
    with monkeypatch.context() as earlier:
        earlier.setattr(os, "getpid", os.getppid)
        last = backend.open_cells(host, PrefillWorkerConfig())
    cells = backend.open_cells(host, PrefillWorkerConfig())
    assert not left.exists() and other.exists()
    assert last.path is not None and last.path.exists()
    last.close()
    assert cells.path is not None
    CellReader(cells.path).close()
    cells.close()
