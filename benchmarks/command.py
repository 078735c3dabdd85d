"""What the commands `python -m benchmarks.NAME` have in common."""

import argparse
import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.graph import ROOT


def parser_of(name: str, about: str | None) -> argparse.ArgumentParser:
    """The parser of `benchmarks.NAME`, with the option --json. about: shown as it is."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--json", type=given_path, metavar="FILE", help="also write the numbers to this file"
    )
    return parser


def begin(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parses the command line, of a benchmark that starts graphs or servers.

    The repository becomes the working directory. SIGTERM becomes a Ctrl-C to this process: what it
    has started is ended first.
    """
    options = parser.parse_args()
    os.chdir(ROOT)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return options


@contextlib.contextmanager
def until_interrupted() -> Iterator[None]:
    """A Ctrl-C ends the body and no more, so that what was measured is reported."""
    try:
        yield
    except KeyboardInterrupt:
        print("\nstopped early; what there is:\n", file=sys.stderr)


def write_json(path: Path | None, found: Any) -> None:
    """path: the value of --json; None: nothing is written. found: what `json` can encode."""
    if path is not None:
        path.write_text(json.dumps(found, indent=2) + "\n")


def given_path(text: str) -> Path:
    """A type of options: `begin` changes the folder that a relative path would be of."""
    return Path(text).absolute()
