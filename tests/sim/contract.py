"""The contract suites' tests, for implementations that they do not know."""

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any


def tests_of(suite: ModuleType, *fixtures: str) -> dict[str, Callable[..., Any]]:
    """The tests of `suite` that ask for one of `fixtures`, by name."""
    return {
        name: test
        for name, test in vars(suite).items()
        if name.startswith("test_") and set(inspect.signature(test).parameters) & set(fixtures)
    }
