"""Tests that this machine cannot run."""

import os
from typing import NoReturn

import pytest


def lacking(why: str) -> NoReturn:
    """Ends the test: skipped on a person's machine, failed with `CI=true`, where a test that never
    runs would not be noticed."""
    if os.environ.get("CI") == "true":
        pytest.fail(why)
    pytest.skip(why)
