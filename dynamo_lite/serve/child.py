"""Entry point of every child process: `python -m dynamo_lite.serve.child`.

Reads its plan from a file, sets up logging, imports one component and hands
over to the process host. Reports go to the supervisor as JSON lines on a pipe.
"""

import argparse
import atexit
import contextlib
import importlib
import logging
import logging.config
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import uvloop

from dynamo_lite.runtime.process.component import ProcessSpec

Report = Callable[[dict[str, Any]], None]


class ChildPlan(msgspec.Struct, frozen=True, kw_only=True):
    """component: "module:Class". logging: see `runtime/process/logs.py`."""

    component: str
    spec: ProcessSpec
    logging: dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(prog="dynamo_lite.serve.child")
    parser.add_argument("--spec", type=Path, required=True)
    parser.add_argument("--report-fd", type=int, required=True)
    args = parser.parse_args()
    # Engine processes must not inherit the pipe.
    os.set_inheritable(args.report_fd, False)
    plan = msgspec.json.decode(args.spec.read_bytes(), type=ChildPlan)
    report = _reporter(args.report_fd)
    logging.config.dictConfig(plan.logging)
    try:
        component = _load(plan.component)(plan.spec.config, plan.spec)
    except Exception as exc:
        logging.getLogger(__name__).exception("cannot create %s", plan.component)
        report({"state": "failed", "error": f"{plan.component}: {exc}"})
        return 1
    # Only the child itself needs the clients of NATS and etcd; the supervisor, which
    # reads this module for ChildPlan, stays free of gRPC.
    from dynamo_lite.runtime.process.host import run_process

    return uvloop.run(run_process(plan.spec, component, report))


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _reporter(descriptor: int) -> Report:
    def report(line: dict[str, Any]) -> None:
        # A supervisor that is gone has sent its death signal; nobody needs the line.
        with contextlib.suppress(BrokenPipeError):
            os.write(descriptor, msgspec.json.encode(line) + b"\n")

    return report


def _leave(code: int) -> NoReturn:
    """Ends the process without taking the interpreter apart.

    By now the loop is closed, and with it what `run_process` had opened: component,
    lease, connections. What is left are exit handlers (logging, vLLM's last trace
    spans) and buffers; threads are not waited for.
    """
    # vLLM freezes the heap; freeing it object by object takes 2 to 10 s.
    try:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


if __name__ == "__main__":
    _leave(main())
