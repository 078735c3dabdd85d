"""The packaged graphs and configurations: which file a name means, and what is listed."""

from pathlib import Path

import pytest

from dynamo_lite.protocol.errors import ConfigError
from dynamo_lite.serve.graphs import config_file, examples, load_graph, packaged_file

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_everything_that_is_packaged_is_listed_with_a_sentence() -> None:
    listed = {name: about for name, (_, about) in examples().items()}
    files = {f"configs/{path.name}" for path in (ROOT / "configs").iterdir()}
    modules = {path.stem for path in (ROOT / "graphs").glob("[!_]*.py")}
    assert {name for name in listed if "/" in name} == files
    assert {name.partition(":")[0] for name in listed if ":" in name} == {
        f"graphs.{module}" for module in modules
    }
    assert [about for about in listed.values() if not about.endswith(".")] == []
    assert not any(load_graph(name).missing() for name in listed if ":" in name)


def test_a_file_in_the_working_directory_goes_before_the_packaged_one(elsewhere: Path) -> None:
    name = Path("configs/agg.yaml")
    assert config_file(name) == packaged_file("configs", "agg.yaml")
    (elsewhere / "configs").mkdir()
    (elsewhere / name).touch()
    assert config_file(name) == name


def test_a_file_that_is_nowhere_is_bad_input(elsewhere: Path) -> None:
    for given in ("configs/ag.yaml", "ag.yaml", "configs/../agg.yaml"):
        with pytest.raises(ConfigError, match="no such file; `dynamo-lite examples` lists"):
            config_file(Path(given))
