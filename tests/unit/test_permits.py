"""Permits: pending until decided, and refused whenever they are not certainly granted."""

from pathlib import Path

import pytest

from dynamo_lite.runtime.clock import boottime
from dynamo_lite.runtime.fence import FenceHolder, FenceReader
from dynamo_lite.runtime.permits import (
    CELLS_OF_PERMIT,
    Permit,
    Permits,
    PermitVerdict,
    grant_of,
    verdict,
)


def test_a_permit_is_pending_until_it_is_decided():
    cells = [0] * (2 * CELLS_OF_PERMIT)
    opened = Permits(cells).open()
    assert verdict(cells, opened.permit) is PermitVerdict.PENDING
    opened.grant(1)
    assert verdict(cells, opened.permit) is PermitVerdict.GRANTED
    opened.refuse()
    assert verdict(cells, opened.permit) is PermitVerdict.REFUSED


def test_a_permit_is_refused_after_its_end_also_when_its_cell_is_used_again():
    cells = [0] * CELLS_OF_PERMIT
    permits = Permits(cells)
    first = permits.open()
    first.grant(1)
    first.close()
    assert verdict(cells, first.permit) is PermitVerdict.REFUSED
    second = permits.open()
    second.grant(1)
    assert second.permit.cell == first.permit.cell
    first.refuse()
    first.grant(1)
    first.close()
    assert verdict(cells, first.permit) is PermitVerdict.REFUSED
    assert verdict(cells, second.permit) is PermitVerdict.GRANTED


@pytest.mark.parametrize("permit", [Permit(), Permit(0, 2), Permit(1, 1)])
def test_a_permit_that_was_not_opened_is_refused(permit: Permit):
    cells = [0] * CELLS_OF_PERMIT
    Permits(cells).open().grant(1)
    assert verdict(cells, permit) is PermitVerdict.REFUSED


def test_the_id_of_the_grant_lies_beside_the_verdict():
    cells = [0] * (2 * CELLS_OF_PERMIT)
    permits = Permits(cells)
    first, second = permits.open(), permits.open()
    first.grant(41)
    second.grant(42)
    assert [grant_of(cells, one.permit) for one in (first, second)] == [41, 42]
    # Whoever sees the verdict first waits for the id.
    cells[first.permit.cell + 1] = 0
    assert verdict(cells, first.permit) is PermitVerdict.PENDING
    first.close()
    third = permits.open()
    assert third.permit.cell == first.permit.cell
    assert grant_of(cells, third.permit) == 0


def test_no_cell_is_used_twice_at_a_time():
    permits = Permits([0] * (2 * CELLS_OF_PERMIT))
    assert {permits.open().permit.cell for _ in range(2)} == {0, CELLS_OF_PERMIT}
    with pytest.raises(RuntimeError, match="more permits than cells"):
        permits.open()


def test_another_process_reads_them_beside_the_fence(tmp_path: Path):
    holder = FenceHolder(tmp_path / "fence", permits=3)
    reader = FenceReader(holder.path)
    opened = [holder.permits.open() for _ in range(3)]
    holder.open_until(boottime() + 10.0)
    assert [reader.verdict(one.permit) for one in opened] == [PermitVerdict.PENDING] * 3
    opened[1].grant(1)
    holder.open_until(boottime() + 20.0)
    found = [reader.verdict(one.permit) for one in opened]
    assert found == [PermitVerdict.PENDING, PermitVerdict.GRANTED, PermitVerdict.PENDING]
    assert reader.grant_of(opened[1].permit) == 1
    assert reader.open()
    holder.close()
    assert [reader.verdict(one.permit) for one in opened] == [PermitVerdict.REFUSED] * 3
    # A job may end after the fence was closed for good.
    opened[0].close()
    reader.close()
