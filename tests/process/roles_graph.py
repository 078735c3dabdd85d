"""A graph with workers of both roles: decode workers with null engines, stand-ins for prefill
workers, and the shipped Frontend."""

from dataclasses import replace

from dynamo_lite.serve.services.services import FRONTEND, PROCESSOR, Service
from tests.process import null_graph
from tests.process.fleet_graph import Prefilling


def told(prompt: list[int], position: int) -> int:
    """The token at a position of the answer to a prompt: a letter of the tiny model."""
    return null_graph.FIRST_TOKEN + (prompt[0] + position) % len(null_graph.LETTERS)


class PromptBackend(null_graph.NullBackend):
    token_at = staticmethod(told)


class PromptWorker(null_graph.NullWorker):
    """Component. Its answers differ with their prompts."""

    backend = PromptBackend


_NULL = Service(
    name="VllmWorker",
    config=null_graph.NullWorkerConfig,
    component=f"{__name__}:PromptWorker",
    scalable=True,
    flags="engine",
).with_defaults(remote_prefill=False)
_served = FRONTEND.link(PROCESSOR).link(_NULL)
#: The shipped Frontend.
Served = replace(_served, services=(*_served.services, *Prefilling.services))
