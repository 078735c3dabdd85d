"""The command line of `scripts/gpu_check`."""

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

from gpu_check.bench import Bench, find_bench
from gpu_check.parts import PARTS
from gpu_check.report import FAILED, REPORT, Result, Skip, as_json, exit_code, line, summary
from gpu_check.runner import run_apart, skipped

_EPILOG = """\
parts:
{parts}

Each part runs in its own process and prints one line: ok, FAILED or skipped, with figures or the
reason, and what to send us when it has failed. --device cpu runs the same parts in host memory,
which tests this command, not a GPU.

exit codes: 0: all parts that ran are ok; 1: a part has failed; 2: no part that needs the
device could run, or the command line is wrong.
"""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check",
        description="Checks on this machine what can only be tested on a GPU.",
        epilog=_EPILOG.format(parts="\n".join(f"  {p.name:<14} {p.about}" for p in PARTS)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only", nargs="+", choices=names, metavar="PART", help="run only these parts"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser.parse_args(argv)


def check(args: argparse.Namespace) -> int:
    chosen = [part for part in PARTS if args.only is None or part.name in args.only]
    bench, missing = Bench("none", "no device", 0), ""
    try:
        bench = find_bench(args.device)
    except Skip as exc:
        missing = str(exc)
    if not args.json:
        print(f"device: {missing or f'{bench.count} x {bench.name}'}", flush=True)
    results: list[Result] = []
    for part in chosen:
        here = not (missing and part.on_device)
        results.append(run_apart(part, bench) if here else skipped(part, missing))
        if not args.json:
            print(line(results[-1], part.send), flush=True)
    report = as_json({**asdict(bench), "missing": missing}, results)
    code = exit_code(results)
    if code == FAILED:
        Path(REPORT).write_text(report)
    print(report if args.json else f"\n{summary(results)}")
    return code


if __name__ == "__main__":
    sys.exit(check(arguments()))
