"""The graph on this host, for the commands that give orders to its supervisor."""

from pathlib import Path

from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.serve.run_state import ProcessState, read_run

#: Between two looks at what was ordered: the supervisor sends no event when its counts change.
POLL_S = 0.2


def check_runs(state_dir: Path) -> None:
    """Raises StartupError."""
    if read_run(state_dir) is None:
        raise StartupError(f"no graph runs on {state_dir}; name its folder with --state-dir")


def processes(state_dir: Path, component: str) -> list[ProcessState]:
    """Empty without a graph."""
    run = read_run(state_dir)
    return [one for one in run.processes if one.service == component] if run else []


def ready_leases(state_dir: Path, component: str) -> list[int]:
    found = processes(state_dir, component)
    return [int(one.lease, 16) for one in found if one.state == "ready" and one.lease]
