"""What the project uses of vLLM is there, and a break is reported with its name and place."""

from pathlib import Path

import pytest

from tests.vllm.seams import breaks, installed

SCHEDULER = "v1/core/sched/scheduler.py"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """vLLM's package, in which files may be replaced; the others are links."""
    own, theirs = tmp_path / "vllm", installed()
    folders = ("", "v1", "v1/core", "v1/core/sched", "entrypoints", "entrypoints/launchers")
    for folder in folders:
        (own / folder).mkdir()
        for entry in (theirs / folder).iterdir():
            if f"{folder}/{entry.name}".strip("/") not in folders:
                (own / folder / entry.name).symlink_to(entry)
    return own


def replace(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.unlink()  # a link
    file.write_text(text.replace(old, new))


def test_the_installed_vllm_has_everything():
    assert breaks(installed()) == []


def test_what_was_renamed_or_moved_is_reported_with_its_place(copy: Path):
    for old, new in (("kv_holding_waiting", "kv_holding"), ("throttle_prefills", "throttled")):
        replace(copy / SCHEDULER, old, new)
    replace(copy / "v1/core/sched/async_scheduler.py", "class AsyncScheduler", "class Overlapping")
    (copy / "entrypoints/launchers/app.py").unlink()
    found = [str(broken) for broken in breaks(copy)]
    for what, where in (
        ("Scheduler has no kv_holding_waiting", "vllm/engine/short_first.py, arrivals.py"),
        ("schedule takes (throttled), ours (throttle_prefills)", "vllm/engine/short_first.py:"),
        ("async_scheduler has no AsyncScheduler", "vllm/engine/arrivals.py:"),
        ("there is no module vllm.entrypoints.launchers.app", "vllm/frontend/openai_app.py:"),
    ):
        assert any(what in line and where in line for line in found), (what, found)
