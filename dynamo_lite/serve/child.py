"""Entry point of every child process: `python -m dynamo_lite.serve.child PLAN DESCRIPTOR`.

Reads its plan from the file, sets up logging, imports one component and runs it in the
process host. Reports go to the supervisor as JSON lines on a pipe.
"""

import atexit
import contextlib
import importlib
import logging
import logging.config
import os
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from dynamo_lite.runtime.process.component import ProcessSpec, Report
from dynamo_lite.runtime.process.death_signal import die_with_parent
from dynamo_lite.runtime.process.imports import import_large
from dynamo_lite.runtime.process.stop import run_loop


class ChildPlan(msgspec.Struct, frozen=True, kw_only=True):
    #: "module:Class".
    component: str
    spec: ProcessSpec
    #: For `logging.config.dictConfig`, see `runtime/process/logs.py`.
    logging: dict[str, Any]


def main(path: str, descriptor: int) -> int:
    """Runs the plan in the file until its end. Returns the exit code. descriptor: of the pipe for
    reports."""
    # Engine processes must not inherit the pipe.
    os.set_inheritable(descriptor, False)
    plan = msgspec.json.decode(Path(path).read_bytes(), type=ChildPlan)
    report = _reporter(descriptor)
    logging.config.dictConfig(plan.logging)
    module, _, name = plan.component.partition(":")
    try:
        component = getattr(importlib.import_module(module), name)(plan.spec.config)
    except Exception as exc:
        logging.getLogger(__name__).exception("cannot create %s", plan.component)
        report({"state": "failed", "error": f"{plan.component}: {exc}"})
        return 1
    # Imported late: the supervisor imports this module for ChildPlan and must not load gRPC.
    from dynamo_lite.runtime.process.host import ProcessEnvironment, run_process
    from dynamo_lite.serve.access import check_access

    environment = ProcessEnvironment(check=check_access)

    async def run() -> NoReturn:
        # Within it: the end of the event loop waits for threads, and one may hang on a file.
        leave(await run_process(plan.spec, component, report, environment))

    return run_loop(run())


def _reporter(descriptor: int) -> Report:
    def report(line: dict[str, Any]) -> None:
        # The supervisor has ended: this process gets its death signal, the line is not needed.
        with contextlib.suppress(BrokenPipeError):
            os.write(descriptor, msgspec.json.encode(line) + b"\n")

    return report


def leave(code: int) -> NoReturn:
    """Ends the process without finalizing the interpreter.

    `run_process` has closed the component, the lease and the connections. Exit handlers
    (logging, vLLM's last trace spans) run and buffers are flushed; threads are not joined.
    """
    # vLLM freezes the heap; freeing it object by object takes 2 to 10 s.
    try:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


if __name__ == "__main__":
    leave(main(sys.argv[1], int(sys.argv[2])))
elif __name__ == "__mp_main__":
    # A process that vLLM starts with `spawn`: multiprocessing imports its parent's main module
    # before anything of vLLM. The coordinator of data-parallel ranks would wait for ever.
    die_with_parent(signal.SIGKILL)
    import_large("vllm.v1.engine.core")
