"""Two hundred mixed requests at once: every token is right, and every block comes back."""

import random
from collections import Counter

import pytest

from tests.vllm.asking import prompt_ids, tokens_of
from tests.vllm.graph import Graph, PlainServer
from tests.vllm.test_decisions import counting

pytestmark = pytest.mark.timeout(400)

REQUESTS = 200
CONCURRENCY = 16


def mixed() -> list[dict]:
    """Lengths of 20 to 1800, a third on shared prefixes, some beyond 4000 tokens."""
    rng = random.Random(1)
    prefixes = [prompt_ids(n, seed=200) for n in (300, 1100)]
    requests = []
    for number in range(REQUESTS):
        prompt = prompt_ids(rng.randrange(20, 1800), seed=1000 + number)
        if number % 3 == 0:
            prompt = rng.choice(prefixes) + prompt[: rng.randrange(20, 800)]
        elif number % 33 == 1:
            prompt = prompt_ids(rng.randrange(4001, 5000), seed=2000 + number)
        requests.append({"prompt": prompt, "max_tokens": rng.randrange(2, 40)})
    return requests


async def test_two_hundred_mixed_requests(disagg: Graph, reference: PlainServer):
    requests = mixed()
    assert sum(len(r["prompt"]) > 4000 for r in requests) >= 3
    (before,) = await disagg.pools()
    since = counting(disagg)
    got = await tokens_of(disagg.url, requests, CONCURRENCY)
    decided = since()
    expected = await tokens_of(reference.url, requests, CONCURRENCY)
    wrong = [i for i in range(REQUESTS) if got[i] != expected[i]]
    assert not wrong, {i: (len(requests[i]["prompt"]), got[i], expected[i]) for i in wrong[:3]}
    kinds = Counter({kind: n for kind, n in decided.items() if n >= 5})
    assert {"local/short", "remote/long"} <= kinds.keys(), decided
    assert sum(decided.values()) == REQUESTS

    await disagg.settled(before.free_blocks)
