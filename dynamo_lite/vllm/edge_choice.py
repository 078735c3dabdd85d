"""Whether vLLM's Rust frontend can serve a configuration, and where its program is.

It has a part of the options of vLLM's Python frontend, and ignores some that it does not
know. So the options that it has are listed here; every other one is an obstacle. Imports
nothing heavy: the command line uses this before anything is started.
"""

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.vllm.compat import no_rust_edge
from dynamo_lite.vllm.http_options import TLS_KEYS

PROGRAM = "vllm-rs"
_GET = "run scripts/get_vllm_rs, and set edge-binary to the path that it prints"

_RUN_S = 20.0

#: vLLM's arguments that the Rust frontend carries out, or that describe the model.
_CARRIED = frozenset(
    {
        *("model", "served-model-name", "dtype", "max-model-len", "generation-config"),
        *("chat-template", "chat-template-content-format", "default-chat-template-kwargs"),
        *("tool-call-parser", "enable-auto-tool-choice", "reasoning-parser", "max-logprobs"),
        *("stream-interval", "disable-log-stats", "enable-log-requests"),
        *("enable-prompt-tokens-details", "enable-request-id-headers"),
        *("allowed-origins", "allowed-methods", "allowed-headers", "allow-credentials"),
    }
)
_NOT_THERE = "vLLM's Rust frontend does not have it"
_KEYS = "vLLM's Rust frontend leaves /tokenize, /detokenize and /load open to everyone"
_NO_ADAPTERS = "LoRA adapters are served by the Python edge only"
_REASONS = {
    "api-key": _KEYS,
    **dict.fromkeys(("enable-lora", "lora-modules"), _NO_ADAPTERS),
    **dict.fromkeys(TLS_KEYS, "TLS is served by the Python edge only"),
    **dict.fromkeys(
        ("disable-uvicorn-access-log", "disable-access-log-for-endpoints"),
        "vLLM's Rust frontend has no access log; remove it",
    ),
}
#: The Frontend's own options that must have their defaults, or be off.
_PYTHON_ONLY = {
    "dashboard": "/dashboard is served by the Python edge only",
    "adapter_folder": _NO_ADAPTERS,
    "max_body_bytes": "vLLM's Rust frontend has a limit of its own",
    "max_request_timeout_s": "vLLM's Rust frontend does not read the header x-request-timeout",
}


@dataclass(frozen=True)
class Obstacle:
    """A configured option that only the Python edge carries out."""

    #: In kebab-case.
    key: str
    reason: str


def obstacles(
    options: Mapping[str, Any],
    defaults: Mapping[str, Any],
    flags: Mapping[str, Any],
    *,
    workers: int,
    key_in_environment: bool,
) -> list[Obstacle]:
    """What keeps the Rust frontend from serving this configuration.

    options, defaults: of the Frontend, in snake_case. flags: vLLM's arguments in kebab-case.
    workers: number of Frontends. key_in_environment: whether VLLM_API_KEY is set for them.
    """
    found = [
        Obstacle(key, _REASONS.get(key, _NOT_THERE))
        for key, value in flags.items()
        if key not in _CARRIED and value is not None
    ]
    if key_in_environment:
        found.append(Obstacle("ServiceArgs.env.VLLM_API_KEY", _KEYS))
    if workers > 1:
        # It would hold connections of the shared port while it still loads.
        found.append(
            Obstacle("ServiceArgs.workers", "several Frontends share a port as Python edges only")
        )
    return found + [
        Obstacle(key.replace("_", "-"), reason)
        for key, reason in _PYTHON_ONLY.items()
        if options[key] not in (defaults[key], False)
    ]


def find_program(given: str | None, vllm: str) -> Path:
    """The path of the Rust frontend's program.

    given: a configured path; None: the one beside vLLM. vllm: name and version of the installed
    one, as of `vllm_version`.

    Raises StartupError unless there is one that has vLLM's version, and can serve.
    """
    program = beside_vllm() if given is None else Path(given).expanduser().resolve()
    if program is None:
        raise StartupError(f"{PROGRAM} is not installed beside vLLM: {_GET}")
    check_version(program, vllm)
    return program


def beside_vllm() -> Path | None:
    spec = find_spec("vllm")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    return next((path for f in folders if (path := Path(f) / PROGRAM).is_file()), None)


def check_version(program: Path, vllm: str) -> None:
    """Raises StartupError unless the program has the version of the installed vLLM, and can
    serve."""
    if why := no_rust_edge(vllm):
        raise StartupError(why)
    try:
        ended = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=_RUN_S, check=True
        )
    except (OSError, UnicodeDecodeError, subprocess.SubprocessError) as exc:
        raise StartupError(f"{program} --version failed: {exc}; {_GET}") from exc
    said = ended.stdout.split()
    if len(said) != 2 or said[0] != PROGRAM:
        raise StartupError(
            f"{program} is not {PROGRAM}: --version prints {' '.join(said[:4])!r}; {_GET}"
        )
    wanted = vllm.partition(" ")[2].partition("+")[0]
    if said[1] != wanted:
        raise StartupError(
            f"{program} has version {said[1]}, the installed vLLM {wanted}: run scripts/get_vllm_rs"
        )
