"""vLLM's arguments are checked by vLLM's own parsers before any process starts.

Importing them takes seconds, so they run in a process of their own, and their verdict on each
section is kept in a file, for every graph that has an equal section.
"""

import asyncio
import contextlib
import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from dynamo_lite.serve.config import GraphConfig, accepted_keys
from dynamo_lite.serve.document import Document, unknown_key
from dynamo_lite.serve.processes import answer_of
from dynamo_lite.serve.run_state import write_private
from dynamo_lite.serve.services.services import Service
from dynamo_lite.vllm.args import UNKNOWN_KEY, Mistake, rules
from dynamo_lite.vllm.compat import require_tested, vllm_version

_VLLM_TIMEOUT_S = 180.0


def check_vllm_arguments(
    config: GraphConfig, document: Document, cache: Path, *, allow_untested: bool = False
) -> None:
    """Adds mistakes to the document. cache: the folder with the verdicts. allow_untested: also of a
    vLLM that was not tried.

    Raises StartupError when vLLM is not installed or was not tried, or its parsers fail.
    """
    services = {c.service.name: c for c in config.services if c.service.flags != "none"}
    if not services:
        return
    sections = {name: {"kind": c.service.flags, "args": c.flags} for name, c in services.items()}
    version = vllm_version()
    require_tested(version, allow_untested=allow_untested)
    files = {name: cache / f"{_key_of(version, s)}.json" for name, s in sections.items()}
    verdicts = {name: _kept(file) for name, file in files.items()}
    if unknown := {name: s for name, s in sections.items() if verdicts[name] is None}:
        mistakes = _ask_vllm(json.dumps(unknown, default=str))
        for name in unknown:
            verdicts[name] = [mistake for mistake in mistakes if mistake["section"] == name]
            _keep(files[name], verdicts[name])
    for name, found in verdicts.items():
        for mistake in found or ():
            document.complain((name, mistake["key"]), _verdict(services[name].service, mistake))


def _key_of(version: str, section: dict[str, Any]) -> str:
    content = json.dumps(section, default=str)
    return sha256(f"{version}\n{rules()}\n{content}".encode()).hexdigest()


def _verdict(service: Service, mistake: Mistake) -> str:
    """The message for a mistake. An unknown key may be a misspelt one of the service's own."""
    if mistake["message"] != UNKNOWN_KEY:
        return mistake["message"]
    message = unknown_key(mistake["key"], accepted_keys(service), mistake["nearest"])
    return f"{message}, and vLLM's own arguments (`vllm serve --help=all`)"


def _kept(file: Path) -> list[Mistake] | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=list[Mistake])
    except (OSError, msgspec.DecodeError):
        return None


def _keep(file: Path, verdict: list[Mistake] | None) -> None:
    """Without it only the next start takes longer."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_private(file, msgspec.json.encode(verdict))


def _ask_vllm(question: str) -> list[Mistake]:
    """Raises StartupError. An interrupt ends the parsers, too."""
    failed, kind = "vLLM's argument parser failed", dict[str, list[Mistake]]
    answer = answer_of(failed, "vllm.args", question.encode(), kind, _VLLM_TIMEOUT_S)
    return asyncio.run(answer).get("mistakes", [])
