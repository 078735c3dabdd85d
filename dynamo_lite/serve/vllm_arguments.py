"""vLLM's arguments are checked by vLLM's own parsers before any process starts.

Importing them takes seconds, so they run in a process of their own.
"""

import asyncio
import json

from dynamo_lite.serve.config import GraphConfig, accepted_keys
from dynamo_lite.serve.document import Document, unknown_key
from dynamo_lite.serve.processes import answer_of
from dynamo_lite.serve.services.services import Service
from dynamo_lite.vllm.args import UNKNOWN_KEY, Mistake
from dynamo_lite.vllm.compat import require_tested, vllm_version

_VLLM_TIMEOUT_S = 180.0


def check_vllm_arguments(
    config: GraphConfig, document: Document, *, allow_untested: bool = False
) -> None:
    """Adds mistakes to the document. allow_untested: also of a vLLM that was not tried.

    Raises StartupError when vLLM is not installed or was not tried, or its parsers fail.
    """
    services = {c.service.name: c for c in config.services if c.service.flags != "none"}
    if not services:
        return
    require_tested(vllm_version(), allow_untested=allow_untested)
    sections = {name: {"kind": c.service.flags, "args": c.flags} for name, c in services.items()}
    for mistake in _ask_vllm(json.dumps(sections, default=str)):
        service = services[mistake["section"]].service
        document.complain((service.name, mistake["key"]), _verdict(service, mistake))


def _verdict(service: Service, mistake: Mistake) -> str:
    """The message for a mistake. An unknown key may be a misspelt one of the service's own."""
    if mistake["message"] != UNKNOWN_KEY:
        return mistake["message"]
    message = unknown_key(mistake["key"], accepted_keys(service), mistake["nearest"])
    return f"{message}, and vLLM's own arguments (`vllm serve --help=all`)"


def _ask_vllm(question: str) -> list[Mistake]:
    """Raises StartupError. An interrupt ends the parsers, too."""
    failed, kind = "vLLM's argument parser failed", dict[str, list[Mistake]]
    answer = answer_of(failed, "vllm.args", question.encode(), kind, _VLLM_TIMEOUT_S)
    return asyncio.run(answer).get("mistakes", [])
