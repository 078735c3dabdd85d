"""Builds wheels of this checkout and installs them into environments of their own."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping
from pathlib import Path

from tests.started import ROOT

#: What the source distribution is made of.
SOURCES = ("dynamo_lite", "graphs", "configs", "scripts")
FILES = ("pyproject.toml", "setup.py", "README.md")
_LIMIT_S = 120.0


def source(folder: Path) -> Path:
    """A copy of what is built, so that building leaves nothing in the checkout."""
    folder.mkdir(parents=True)
    for name in SOURCES:
        unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, folder / name, ignore=unwanted)
    for name in FILES:
        shutil.copy(ROOT / name, folder / name)
    return folder


def build(folder: Path, out: Path) -> list[Path]:
    """`python -m build` with the tools of this environment. Returns the distributions."""
    _run(
        *(sys.executable, "-m", "build", "--no-isolation", "--skip-dependency-check"),
        *("--outdir", str(out), str(folder)),
    )
    return sorted(out.iterdir())


class Installation:
    """A fresh environment with one wheel, on the dependencies of this one."""

    def __init__(self, folder: Path, wheel: Path):
        venv.create(folder, with_pip=False, symlinks=True)
        self.folder = folder
        [site] = folder.glob("lib/python3.*/site-packages")
        python = str(folder / "bin" / "python")
        _run(
            *(sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python),
            *("install", "--quiet", "--no-deps", "--no-index", "--no-compile", str(wheel)),
        )
        # Plain paths: the `.pth` files there are not read, so no editable install comes along.
        here = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
        also = [path for path in sys.path if path.endswith("site-packages")]
        (site / "dependencies.pth").write_text("\n".join(dict.fromkeys([*here, *also])) + "\n")
        self.site = site

    @property
    def command(self) -> tuple[str, ...]:
        return (str(self.folder / "bin" / "dynamo-lite"),)

    @property
    def environment(self) -> Mapping[str, str]:
        """Ours without the checkout; the programs of the dependencies are found."""
        env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
        tools = [*(str(Path(p).parents[2] / "bin") for p in sys.path if p.endswith("-packages"))]
        env["PATH"] = os.pathsep.join([str(self.folder / "bin"), *tools, env["PATH"]])
        return env

    def run(self, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs `dynamo-lite` to its end."""
        return subprocess.run(
            [*self.command, *arguments],
            cwd=cwd,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
        )


def _run(*command: str) -> None:
    ran = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        env={**os.environ, "PYTHONPATH": ""},
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
