"""Prompts with images, and prompts of embeddings: computed where they are decoded, and equal to
plain vLLM's. Text prompts of the same model are prefilled remotely."""

import base64
import io
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image

from tests.vllm.asking import ask, assert_same, prompt_ids, prose
from tests.vllm.graph import Graph, PlainServer
from tests.vllm.models import model_of
from tests.vllm.test_decisions import counting
from tests.vllm.test_migration import answers_of, streams_of

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(400)]

GREEDY = {"temperature": 0, "max_tokens": 16}
HIDDEN = 128


def image(seed: int, width: int = 150, height: int = 130) -> dict[str, Any]:
    """Part of a chat message: noise, as a PNG."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def text(words: int, seed: int) -> dict[str, Any]:
    return {"type": "text", "text": prose(words, seed)}


def chat(*parts: dict[str, Any], **params: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}], **GREEDY, **params}


def embeddings(tokens: int, seed: int) -> str:
    made = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))
    file = io.BytesIO()
    torch.save(made, file)
    return base64.b64encode(file.getvalue()).decode()


class Served(NamedTuple):
    graph: Graph
    plain: PlainServer


@pytest.fixture(scope="module")
def served(stage, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    stage.clear()
    directory = tmp_path_factory.mktemp("media")
    flags = {"model": str(model_of("images")), "limit-mm-per-prompt": {"image": 3}}
    embedded = ("Frontend", "VllmWorker", "PrefillWorker")
    options = [
        f"--Common.model={flags['model']}",
        *(f"--{s}.limit-mm-per-prompt={json.dumps({'image': 3})}" for s in embedded),
        *(f"--{service}.enable-prompt-embeds=true" for service in embedded),
    ]
    plain = PlainServer(directory / "plain", flags={**flags, "enable-prompt-embeds": True})
    graph = Graph(directory / "graph", options=options)
    with plain, graph:
        yield Served(graph, plain)


def test_images_are_computed_here_and_long_text_is_not(served: Served):
    """The last prompt is long. A second time the images are known to the Frontend."""
    prompts = [
        chat(image(1), text(9, 1)),
        chat(image(2), text(9, 1)),
        chat(text(5, 2), image(1), text(30, 3), image(3, 40, 300)),
        chat(text(700, 4), image(4), text(20, 5)),
    ]
    expected = [ask(served.plain.url, "chat", prompt) for prompt in prompts]
    said = {answer["choices"][0]["message"]["content"] for answer in expected}
    assert len(said) == len(prompts), "images tell"
    since = counting(served.graph)
    for _ in range(2):
        for prompt, right in zip(prompts, expected, strict=True):
            assert_same(ask(served.graph.url, "chat", prompt), right)
    assert since() == {"local/not_transferable": 2 * len(prompts)}
    since = counting(served.graph)
    long = {"prompt": prompt_ids(1200, seed=1600), **GREEDY}
    assert_same(
        ask(served.graph.url, "completions", long), ask(served.plain.url, "completions", long)
    )
    assert since() == {"remote/long": 1}


def test_an_image_and_embeddings_in_one_chat(served: Served):
    part = {"type": "prompt_embeds", "data": embeddings(12, 7)}
    prompt = chat(image(1), part, text(9, 1))
    assert_same(ask(served.graph.url, "chat", prompt), ask(served.plain.url, "chat", prompt))


async def test_prompts_of_embeddings(served: Served):
    asked = [("completions", {"prompt_embeds": embeddings(40 + i, i), **GREEDY}) for i in range(3)]
    expected = await answers_of(served.plain.url, streams_of(asked))
    for answer, right in zip(
        await answers_of(served.graph.url, streams_of(asked)), expected, strict=True
    ):
        assert_same(answer, right)
