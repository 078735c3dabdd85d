"""`scripts/gpu_check`: its pieces in host memory, and that each of them can fail."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from vllm.platforms import current_platform

from gpu_check import __main__, transfers
from gpu_check import descriptors as descriptors_part
from gpu_check.bench import Bench
from gpu_check.descriptors import descriptors
from gpu_check.graph import Trial, check, named
from gpu_check.parts import PARTS
from gpu_check.report import REPORT, CheckFailed, Figures, Result, line

CPU, GPU = Bench("cpu", "host memory", 1), Bench("cuda", "some GPU", 1)
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("name", "holds"),
    [
        ("registration", lambda figures: figures["MiB"] > 0),
        ("write", lambda figures: figures["GB/s"] > 0),
        ("events", lambda figures: figures["kernel and write ms"] >= 1e3 * transfers._BUSY_S),
        ("polling", lambda figures: figures["notice ms with thread"] < figures["busy ms"]),
        ("posting", lambda figures: (figures["tokens"], figures["descriptors"]) == (128, 32)),
        ("transposition", lambda figures: figures["cases"] > 0),
    ],
)
def test_pieces_work_in_host_memory(name: str, holds: Callable[[Figures], bool], monkeypatch):
    monkeypatch.setattr(transfers, "_MODEL", (2, 8, 4, 16, 16))
    assert holds(next(part for part in PARTS if part.name == name).run(CPU))


@pytest.mark.heavy
def test_pools_that_hand_out_no_runs_are_seen(monkeypatch):
    assert descriptors(CPU)["fresh pools"] == 36
    monkeypatch.setattr(descriptors_part, "hand_out_runs", lambda pool: None)
    with pytest.raises(CheckFailed, match="descriptors on used pools and 36 on fresh"):
        descriptors(CPU)


RIGHT = [[1, 2], [3, 4]]


def context(monkeypatch: pytest.MonkeyPatch, found: int) -> object:
    monkeypatch.setattr(current_platform, "set_device", lambda _: None)
    monkeypatch.setattr(transfers, "current_context", lambda: found)
    return transfers.context(GPU)


def graph(found: list[list[int]] = RIGHT, committed: int = 1, log: str = "V2") -> object:
    return check(Trial([40, 600], said="V2"), RIGHT, found, committed, {"D": "V2", "P": log})


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (lambda patch: context(patch, 7), "ok"),
        (lambda patch: context(patch, 0), "the transfer thread has no CUDA context on cuda:0"),
        # Whatever the first one takes, which also connects.
        (lambda _: transfers.posted([9.0, 0.1, 0.01], 18432, 32768, GPU), "ok"),
        (lambda _: transfers.posted([9.0, 0.03], 18432, 32768, CPU), "ok"),
        (lambda _: transfers.posted([0.0, 0.03], 18432, 32768, GPU), "the engine's thread is kept"),
        (lambda _: graph(), "ok"),
        (lambda _: graph([[1, 2], [3, 5]]), "prompt 1: plain vLLM and the graph differ from new"),
        (lambda _: graph(committed=0), "only 0 of 1 long prompts were prefilled remotely"),
        (lambda _: graph(log="V1"), "the log of P does not have 'V2'"),
        (lambda _: named("FLASH_ATTN"), "ok"),
        (lambda _: named("None"), "the decode engine's fingerprint has attention 'None'"),
        (lambda _: named(""), "the decode engine's fingerprint has attention ''"),
    ],
)
def test_what_a_gpu_gets_wrong_is_seen(
    monkeypatch, part: Callable[[pytest.MonkeyPatch], object], says: str
):
    try:
        part(monkeypatch)
        said = "ok"
    except CheckFailed as exc:
        said = str(exc)
    assert said.startswith(says)


def test_a_verdict_is_one_line_with_what_to_send():
    failed = Result("write", "FAILED", "other bytes\nTraceback", {"GB/s": 2.0}, 1.0)
    said = line(failed, "the log")
    assert said.endswith(" 1.0 s  other bytes; GB/s 2; send us gpu_check.json and the log")
    assert line(Result("write", "skipped", "no GPU"), "the log").endswith("skipped  no GPU")


@NO_GPU
def test_without_a_gpu_the_command_says_so_and_tries_nothing(capsys):
    assert __main__.check(__main__.arguments(["--only", "write", "graph"])) == 2
    said = capsys.readouterr().out
    assert said.startswith("device: torch ") and "0 ok, 0 FAILED, 2 skipped" in said


def test_a_failure_is_reported_in_a_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    failed = Result("write", "FAILED", "other bytes\nTraceback")
    monkeypatch.setattr(__main__, "run_apart", lambda *_: failed)
    assert __main__.check(__main__.arguments(["--only", "write", "--device", "cpu"])) == 1
    report = json.loads((tmp_path / REPORT).read_text())
    assert report["results"][0]["detail"].endswith("Traceback") and report["versions"]["torch"]
    assert f"other bytes; send us {REPORT} and the output of" in capsys.readouterr().out


@NO_GPU
@pytest.mark.heavy
def test_the_command_prints_json():
    script = Path(__file__).parents[3] / "scripts" / "gpu_check"
    said = subprocess.run(
        [script, "--json", "--only", "write", "descriptors"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert said.returncode == 2, said.stderr
    found = json.loads(said.stdout)
    assert [result["outcome"] for result in found["results"]] == ["skipped", "ok"]
    assert found["device"]["missing"] and found["exit_code"] == 2
