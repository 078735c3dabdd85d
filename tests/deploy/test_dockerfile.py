"""The Dockerfile: its rules of style, and that it installs what the project installs elsewhere."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

from tests.deploy.command_lines import DEPLOY
from tests.deploy.kustomize import build
from tests.process import wheels

DOCKERFILE = DEPLOY / "Dockerfile"


def instructions() -> list[tuple[str, str]]:
    """Each instruction and its argument, with continuation lines joined."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    words = [line.partition(" ") for line in joined.splitlines() if line]
    return [(name, rest) for name, _, rest in words]


def runs(containing: str) -> list[str]:
    return [rest for name, rest in instructions() if name == "RUN" and containing in rest]


def test_hadolint_finds_nothing() -> None:
    program = Path(sys.executable).parent / "hadolint"
    checked = subprocess.run([str(program), str(DOCKERFILE)], capture_output=True, text=True)
    assert (checked.returncode, checked.stdout) == (0, "")


def test_the_wheel_is_built_from_what_the_packaging_test_builds() -> None:
    copied = [rest.split()[:-1] for name, rest in instructions() if name == "COPY"]
    sources = {path for words in copied for path in words if not path.startswith(("--", "/"))}
    assert sources == {*wheels.SOURCES, *wheels.FILES}
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert {line[1:] for line in ignored if line.startswith("!")} == sources
    [command] = runs("python -m build")
    assert shlex.split(command)[:4] == ["python", "-m", "build", "--wheel"]


def test_it_runs_as_the_user_and_in_the_folder_that_the_manifests_have() -> None:
    words = dict(instructions())
    uid, gid = words["USER"].split(":")
    assert f"--uid {uid}" in runs("useradd")[0]
    for resource in build(DEPLOY / "kubernetes" / "overlays" / "cpu"):
        if resource["kind"] == "Deployment":
            pod = resource["spec"]["template"]["spec"]
            context = pod["securityContext"]
            assert (context["runAsUser"], context["fsGroup"]) == (int(uid), int(gid))
            mounted = [mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]]
            assert words["WORKDIR"] in mounted
    assert f"{words['WORKDIR']}:exec,uid={uid},gid={gid}" in (DEPLOY / "compose.yaml").read_text()
    assert words["ENTRYPOINT"] == '["tini", "--", "dynamo-lite"]'
