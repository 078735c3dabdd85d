"""vLLM's arguments in every shipped configuration file, with vLLM's own parsers."""

from pathlib import Path
from typing import Any

from dynamo_lite.serve.config import resolve
from dynamo_lite.serve.document import read_document
from dynamo_lite.serve.graphs import load_graph
from dynamo_lite.vllm.args import check
from tests.deploy.command_lines import DEPLOY, ROOT

FILES = [
    *sorted(path for path in (ROOT / "configs").iterdir() if "forward" not in path.name),
    *sorted(DEPLOY.rglob("graph.yaml")),
]


#: Where it is not `graphs.disagg`, by file.
GRAPHS = {"agg": "graphs.agg:Frontend", "disagg_planner": "graphs.disagg_planner:Frontend"}


def sections(path: Path) -> dict[str, Any]:
    """What `serve` asks vLLM's parsers about a file."""
    document = read_document(path, [])
    graph = load_graph(GRAPHS.get(path.stem, "graphs.disagg:Frontend"))
    config = resolve(graph, document)
    document.raise_mistakes()
    name = path.relative_to(ROOT)
    return {
        f"{name} {one.service.name}": {"kind": one.service.flags, "args": one.flags}
        for one in config.services
        if one.service.flags != "none"
    }


def test_vllm_takes_them_all() -> None:
    question = {key: value for path in FILES for key, value in sections(path).items()}
    assert len(question) > 20
    question["wrong"] = {"kind": "engine", "args": {"model": "m", "blok-size": 1}}
    assert [(one["section"], one["key"]) for one in check(question)] == [("wrong", "blok-size")]
