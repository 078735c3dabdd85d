"""Tests that a machine cannot run are skipped, but not in CI."""

import pytest

from tests.lacking import lacking


@pytest.mark.parametrize(
    ("ci", "ends"),
    [
        ("true", pytest.fail.Exception),
        ("false", pytest.skip.Exception),
        (None, pytest.skip.Exception),
    ],
)
def test_a_test_that_cannot_run_fails_in_ci_only(
    ci: str | None, ends: type[BaseException], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("CI", raising=False)
    if ci is not None:
        monkeypatch.setenv("CI", ci)
    with pytest.raises(ends, match="no gcc"):
        lacking("no gcc")
