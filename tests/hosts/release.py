"""A later release of this checkout, installed beside it."""

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from dynamo_lite import __version__
from tests.process.command import ROOT
from tests.process.wheels import source

#: On a machine that is busy with other things.
_LIMIT_S = 400.0


@dataclass(frozen=True)
class Release:
    """version: what its processes report. packages: where it is installed. folder: to run it in;
    the checkout would come before `packages` in its own folder."""

    version: str
    packages: Path
    folder: Path


CHECKOUT = Release(__version__, ROOT, ROOT)


def install(folder: Path) -> Release:
    """The same code under the next patch version, installed as from a wheel."""
    release = Release(_next(__version__), folder / "packages", folder / "work")
    code = source(folder / "source")
    module = code / "dynamo_lite" / "__init__.py"
    text, found = re.subn(
        r"^__version__ = .*$",
        f'__version__ = "{release.version}"',
        module.read_text(),
        flags=re.MULTILINE,
    )
    assert found == 1
    module.write_text(text)
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"),
            *("--no-deps", "--no-index", "--no-build-isolation"),
            *("--target", str(release.packages), str(code)),
        ],
        check=True,
        timeout=_LIMIT_S,
    )
    release.folder.mkdir()
    # The demo model, and the graphs with null engines, which are in no wheel.
    for name in (".dynamo-lite", "tests"):
        (release.folder / name).symlink_to(ROOT / name)
    return release


def _next(version: str) -> str:
    major, minor, patch = version.split(".")
    return f"{major}.{minor}.{int(patch) + 1}"
