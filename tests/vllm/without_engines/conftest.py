from pathlib import Path

import pytest

from tests.vllm.front_half import write_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model without weights. No test changes it."""
    return write_model(tmp_path_factory.mktemp("model"))
