"""The wheel: what is in it, and that it serves from an empty folder without a checkout."""

import json
import subprocess
import sys
import tarfile
import urllib.request
import zipfile
from pathlib import Path

import pytest
import yaml

from dynamo_lite import __version__
from tests.process.command import serving
from tests.process.null_graph import copy_to, is_answer
from tests.process.wheels import Installation, build, source
from tests.started import ROOT, VLLM_PATIENCE_S

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Source distribution and wheel; the wheel is built from the source distribution."""
    folder = tmp_path_factory.mktemp("build")
    return build(source(folder / "source"), folder / "dist")


@pytest.fixture(scope="module")
def installed(distributions: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Installation:
    [wheel] = [path for path in distributions if path.suffix == ".whl"]
    return Installation(tmp_path_factory.mktemp("installed") / "venv", wheel)


def test_the_distributions_have_every_file_and_pass_the_index_s_checks(
    distributions: list[Path],
) -> None:
    archive, wheel = sorted(distributions, key=lambda path: path.suffix == ".whl")
    assert wheel.name == f"dynamo_lite-{__version__}-py3-none-any.whl"
    expected = {path.relative_to(ROOT) for path in (ROOT / "dynamo_lite").rglob("*.*")}
    expected = {path for path in expected if "__pycache__" not in path.parts}
    for folder, pattern in (("graphs", "*.py"), ("configs", "*.yaml"), ("scripts", "*.py")):
        files = {path.relative_to(ROOT) for path in (ROOT / folder).glob(pattern)}
        expected |= {Path("dynamo_lite") / path for path in files}
    inside = {Path(name) for name in zipfile.ZipFile(wheel).namelist() if ".dist-info" not in name}
    assert inside == expected
    with tarfile.open(archive) as tar:
        assert not [name for name in tar.getnames() if "tests" in name or "__pycache__" in name]
    checked = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *map(str, distributions)],
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stdout


def test_the_installed_command_and_what_is_packaged(
    installed: Installation, tmp_path: Path
) -> None:
    assert installed.run(tmp_path, "--version").stdout == f"dynamo-lite {__version__}\n"
    assert "serve" in installed.run(tmp_path, "--help").stdout
    listed = installed.run(tmp_path, "examples").stdout
    assert "graphs.disagg:Frontend" in listed
    assert "configs/disagg.yaml" in listed
    shown = installed.run(tmp_path, "examples", "configs/agg.yaml").stdout
    assert shown == (ROOT / "configs/agg.yaml").read_text()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("graph", "config", "shown"),
    [
        ("graphs.disagg:Frontend", "disagg.yaml", ("PrefillWorker", "concurrency", 2)),
        ("graphs.forward:Forwarder", "forward_nixl.yaml", ("Forwarder", "protocol", "nixl")),
    ],
)
def test_the_packaged_graph_and_file_are_found_from_an_empty_folder(
    installed: Installation, tmp_path: Path, graph: str, config: str, shown: tuple[str, str, object]
) -> None:
    asked = ("serve", graph, "-f", f"configs/{config}", "--dry-run")
    ran = installed.run(tmp_path, *asked)
    assert ran.returncode == 0, ran.stderr
    where = installed.site / "dynamo_lite" / "configs" / config
    assert ran.stderr == f"configs/{config}: the packaged file, {where}\n"
    section, option, value = shown
    assert yaml.safe_load(ran.stdout)[section][option] == value


@pytest.mark.timeout(400)
def test_it_serves_from_an_empty_folder_and_makes_the_demo_model(
    installed: Installation, tmp_path: Path
) -> None:
    copy_to(tmp_path)
    with serving(
        tmp_path / "state",
        *("-f", "configs/agg.yaml", "--Frontend.port=0", "--VllmWorker.ServiceArgs.workers=2"),
        graph="null_graph:Frontend",
        command=installed.command,
        cwd=tmp_path,
        env=installed.environment,
    ) as graph:
        graph.wait_line("making the demo model in .dynamo-lite/models/tiny", VLLM_PATIENCE_S)
        url = graph.wait_line("ready http", VLLM_PATIENCE_S).split()[1]
        graph.processes()
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 12}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            assert is_answer(json.load(reply)["choices"][0]["text"], 12)
