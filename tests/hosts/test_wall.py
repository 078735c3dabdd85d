"""The wall clocks of hosts: they differ, and every duration is as it was."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.hosts.wall import build, no_compiler, shifted
from tests.lacking import lacking

pytestmark = pytest.mark.heavy


@pytest.fixture(autouse=True, scope="module")
def a_compiler() -> None:
    if why := no_compiler():
        lacking(why)


_CLOCKS = """
import datetime, threading, time
began = time.monotonic()
threading.Event().wait(0.05)
print(round(time.time()), round(datetime.datetime.now().timestamp()), time.monotonic() - began < 30)
"""


@pytest.mark.parametrize("by_s", [-300, 300])
def test_a_shifted_wall_clock_changes_no_duration(tmp_path: Path, by_s: int) -> None:
    env = {**os.environ, **shifted(build(tmp_path), by_s)}
    command = [sys.executable, "-c", _CLOCKS]
    said = subprocess.check_output(command, env=env, text=True, timeout=60).split()
    assert [abs(int(now) - time.time() - by_s) < 60 for now in said[:2]] == [True, True]
    assert said[2] == "True"


_WAITS = """
#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <time.h>
int main(void) {
    pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t condition = PTHREAD_COND_INITIALIZER;
    sem_t semaphore;
    struct timespec from, until, to;
    clock_gettime(CLOCK_MONOTONIC, &from);
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 1;
    pthread_mutex_lock(&mutex);
    if (pthread_cond_timedwait(&condition, &mutex, &until) != ETIMEDOUT)
        return 1;
    sem_init(&semaphore, 0, 0);
    until.tv_sec += 1;
    if (sem_timedwait(&semaphore, &until) != -1 || errno != ETIMEDOUT)
        return 2;
    clock_gettime(CLOCK_MONOTONIC, &to);
    return to.tv_sec - from.tv_sec < 1 ? 3 : 0;
}
"""


@pytest.mark.parametrize("by_s", [-300, 300])
def test_waits_until_a_wall_time_are_as_long_under_a_shifted_clock(
    tmp_path: Path, by_s: int
) -> None:
    (tmp_path / "waits.c").write_text(_WAITS)
    program = tmp_path / "waits"
    subprocess.run(["gcc", "-o", program, tmp_path / "waits.c", "-lpthread"], check=True)
    env = {**os.environ, **shifted(build(tmp_path), by_s)}
    assert subprocess.run([program], env=env, timeout=60).returncode == 0
