"""A break in what the project uses of vLLM is reported with its name and place."""

import inspect
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from vllm.v1.engine.async_llm import AsyncLLM

from dynamo_lite.vllm.frontend.remote_client import RemoteEngineClient
from tests.vllm.seams import OURS, breaks


def changed(folder: Path, *changes: tuple[str, str, str]) -> Path:
    """vLLM's package in a folder, with (file, old, new); all else of it is links. With an empty
    `transformers`: the star imports of its models would be most of pyright's time."""
    (folder / "transformers.py").touch()
    spec = find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations
    theirs = Path(spec.submodule_search_locations[0])
    files = {Path(file) for file, _, _ in changes}
    folders = {parent for file in files for parent in file.parents}
    for each in sorted(folders):
        (folder / "vllm" / each).mkdir()
        for entry in (theirs / each).iterdir():
            if (name := entry.relative_to(theirs)) in files:
                (folder / "vllm" / name).write_text(entry.read_text())
            elif name not in folders:
                (folder / "vllm" / name).symlink_to(entry)
    for file, old, new in changes:
        text = (folder / "vllm" / file).read_text()
        assert old in text
        (folder / "vllm" / file).write_text(text.replace(old, new))
    return folder


@pytest.mark.timeout(300)
def test_what_was_renamed_is_reported_with_its_place(tmp_path: Path):
    """`scripts/check` sees that the installed vLLM has everything."""
    scheduling = "v1/core/sched"
    broken = changed(
        tmp_path,
        (f"{scheduling}/scheduler.py", "kv_holding_waiting", "kv_holding"),
        (f"{scheduling}/scheduler.py", "throttle_prefills", "throttled"),
        (f"{scheduling}/async_scheduler.py", "class AsyncScheduler", "class Overlapping"),
    )
    found = "\n".join(breaks([OURS / "engine" / "short_first.py"], broken))
    place = r"dynamo_lite/vllm/engine/short_first\.py:\d+: "
    for what in (
        'Cannot access attribute "kv_holding_waiting"',
        'Method "schedule" overrides class "Scheduler" in an incompatible manner',
        '"AsyncScheduler" is unknown import symbol',
    ):
        assert re.search(f"^{place}{re.escape(what)}", found, re.MULTILINE), (what, found)


def test_the_client_sets_what_vllms_methods_read():
    """Its constructor does not call vLLM's, which would start an engine."""
    assigned = re.compile(r"self\.(\w+)(?:: [^=\n]+)? = ")
    theirs = set(assigned.findall(inspect.getsource(AsyncLLM.__init__)))
    ours = set(assigned.findall(inspect.getsource(RemoteEngineClient.__init__)))
    rest = inspect.getsource(AsyncLLM).replace(inspect.getsource(AsyncLLM.__init__), "")
    read = set(re.findall(r"self\.(\w+)\b(?! = )", rest))
    assert "output_processor" in theirs & read
    assert theirs & read - ours == set()
