"""vLLM's command line: converts YAML keys to flags and validates them with vLLM's parser.

`python -m dynamo_lite.vllm.args` reads
`{section: {"kind": "engine" | "frontend", "args": {key: value}}}` as JSON from
standard input and prints `{"mistakes": [{section, key, message, nearest}]}`.
It runs in a process of its own because importing vLLM's parsers takes seconds.
"""

import argparse
import difflib
import io
import json
import sys
from collections.abc import Collection
from contextlib import redirect_stderr, redirect_stdout
from typing import Any, TypedDict

from dynamo_lite.runtime.process.imports import import_large
from dynamo_lite.vllm import compat
from dynamo_lite.vllm.accepted_args import groups_of, refusal

#: The message about a key that vLLM does not have.
UNKNOWN_KEY = "unknown key"


class Mistake(TypedDict):
    """A key that is not accepted."""

    section: str
    key: str
    message: str
    #: For an unknown key: similar keys of vLLM's, best first.
    nearest: list[str]


def engine_flags(args: dict[str, Any]) -> list[str]:
    """Returns command-line flags for kebab-case `args`.

    true and false become `--key` and `--no-key`, a mapping becomes JSON, a list several values
    after one flag, and null is left out.
    """
    return [part for key, value in args.items() for part in _flag(key, value)]


def _flag(key: str, value: Any) -> list[str]:
    match value:
        case None:
            return []
        case True:
            return [f"--{key}"]
        case False:
            return [f"--no-{key}"]
        case dict():
            return [f"--{key}", _json(value)]
        case list():
            return [f"--{key}", *(_word(item) for item in value)]
        case _:
            # One word: a value that begins with a dash must not be read as a flag.
            return [f"--{key}={_word(value)}"]


def _word(value: Any) -> str:
    return _json(value) if isinstance(value, dict | list | bool) else str(value)


def _json(value: Any) -> str:
    """YAML has dates, which JSON has not."""
    return json.dumps(value, default=str)


def check(sections: dict[str, dict[str, Any]]) -> list[Mistake]:
    """Returns every key that is not accepted. Imports vLLM."""
    parsers: dict[str, argparse.ArgumentParser] = {}
    mistakes: list[Mistake] = []
    for section, content in sections.items():
        kind = content["kind"]
        if kind not in parsers:
            parsers[kind] = _parser(kind)
        groups = groups_of(parsers[kind])
        for key, value in content["args"].items():
            found, nearest = _judge(parsers[kind], groups, key, value)
            message = refusal(kind, key, groups.get(key, "")) or found
            nearest = [name for name in nearest if not refusal(kind, name, groups[name])]
            if message:
                mistakes.append(
                    {"section": section, "key": key, "message": message, "nearest": nearest}
                )
    return mistakes


def _parser(kind: str) -> argparse.ArgumentParser:
    import_large("vllm.engine.arg_utils")
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    if kind == "engine":
        return AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    return compat.make_arg_parser(FlexibleArgumentParser())


def _judge(
    parser: argparse.ArgumentParser, known: Collection[str], key: str, value: Any
) -> tuple[str, list[str]]:
    """The mistake in one key, and similar keys if it is unknown; ("", []) if it is accepted."""
    accepted = [name for name in known if not (name.startswith("no-") and name[3:] in known)]
    if key not in accepted:
        return UNKNOWN_KEY, difflib.get_close_matches(key, accepted, n=5, cutoff=0.6)
    if parser._option_string_actions[f"--{key}"].nargs == 0 and not isinstance(value, bool):
        return f"expected true or false, got {value!r}", []
    errors = io.StringIO()
    try:
        with redirect_stderr(errors), redirect_stdout(io.StringIO()):
            parser.parse_args(_flag(key, value))
    except SystemExit:
        said = errors.getvalue().strip().rpartition("error: ")[2]
        said = " ".join(said.split()).removeprefix(f"argument --{key}: ")
        return said or "vLLM does not accept this value", []
    except (ValueError, TypeError, argparse.ArgumentError) as exc:
        return str(exc), []
    return "", []


def main() -> None:
    sections = json.load(sys.stdin)
    # vLLM sometimes logs to standard output, which must only have the result.
    with redirect_stdout(sys.stderr):
        mistakes = check(sections)
    json.dump({"mistakes": mistakes}, sys.stdout)


if __name__ == "__main__":
    main()
