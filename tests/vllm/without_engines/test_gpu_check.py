"""`scripts/gpu_check`: its pieces in host memory, and that each of them can fail."""

import json
import subprocess
from importlib import import_module
from pathlib import Path

import pytest
import torch

from benchmarks.used_pools import Job
from gpu_check import descriptors as descriptors_part
from gpu_check import kernels, transfers
from gpu_check.bench import Bench
from gpu_check.descriptors import counts_per_job, descriptors
from gpu_check.parts import PARTS
from gpu_check.report import CheckFailed

pytestmark = pytest.mark.heavy

CPU = Bench("cpu", "host memory", 1)
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


@pytest.mark.parametrize("name", ["registration", "write", "events", "polling"])
def test_pieces_between_two_processes_work_in_host_memory(name):
    figures = getattr(transfers, name)(CPU)
    assert figures
    if name == "events":
        assert figures["kernel and write ms"] >= 1e3 * transfers._BUSY_S
    if name == "polling":
        assert figures["notice ms with thread"] < figures["busy ms"]


def test_transposition_works_in_host_memory():
    assert kernels.transposition(CPU)


def test_descriptors_are_counted_per_job():
    jobs = [Job([1, 2, 3], [7, 8, 9]), Job([5, 4, 9], [1, 2, 3])]
    assert counts_per_job(jobs) == [36, 3 * 36]
    figures = descriptors(CPU)
    assert figures["fresh pools"] == 36


def test_pools_that_hand_out_no_runs_are_seen(monkeypatch):
    monkeypatch.setattr(descriptors_part, "hand_out_runs", lambda pool: None)
    with pytest.raises(CheckFailed, match="descriptors on used pools and 36 on fresh"):
        descriptors(CPU)


@NO_GPU
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


def test_every_part_names_a_function_that_is_there():
    for each in PARTS:
        assert callable(getattr(import_module(each.module), each.name))
