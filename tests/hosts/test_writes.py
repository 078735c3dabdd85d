"""The verdict on late writes, from what the workers count."""

from collections import Counter

import pytest

from tests.hosts.kv import Writes

pytestmark = pytest.mark.heavy

_UNGRANTED = 'dropped_messages{where="ungranted"}'


class Counts:
    """In the place of meters."""

    def __init__(self, counts: dict[str, int]):
        self.counts = Counter(counts)

    def totals(self) -> Counter[str]:
        return self.counts.copy()


def test_what_somebody_else_has_written_is_trouble() -> None:
    counts = Counts({"commit_mismatches": 1, _UNGRANTED: 2})
    writes = Writes(counts)  # type: ignore[arg-type]
    assert writes.trouble() == []  # it was before
    counts.counts["commit_mismatches"] += 1
    assert writes.trouble() == ["commit_mismatches: 1"]
    counts.counts[_UNGRANTED] += 3
    assert writes.trouble() == ["commit_mismatches: 1", f"{_UNGRANTED}: 3"]


def test_what_the_safeties_refused_is_only_said() -> None:
    counts = Counts({})
    writes = Writes(counts)  # type: ignore[arg-type]
    counts.counts += Counter(fenced_writes=2, late_notices=1)
    assert str(writes) == "2 writes refused by the fence, 1 late notices"
    assert writes.trouble() == []
