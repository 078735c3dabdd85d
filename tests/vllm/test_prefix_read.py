"""Prefixes that only the decode engine holds, on real engines."""

import pytest

from tests.vllm.asking import ask, assert_same, prompt_ids
from tests.vllm.graph import Graph, PlainServer, eventually
from tests.vllm.test_decisions import LIMIT, completion, counting

pytestmark = pytest.mark.timeout(300)

BLOCK = 32
READS = "dynamo_lite_prefix_reads_total"
COMPUTED = "dynamo_lite_prefill_computed_tokens_total"


def test_what_the_decode_engine_computed_is_read_and_not_computed_again(
    disagg: Graph, reference: PlainServer
):
    short = prompt_ids(LIMIT - 2, seed=500)
    assert ask(disagg.url, "completions", completion(short))["usage"]
    since, computed = counting(disagg), disagg.count("PrefillWorker", COMPUTED)
    reads = disagg.count("PrefillWorker", READS, outcome="read")
    long = short + prompt_ids(LIMIT + 200, seed=501)
    got = ask(disagg.url, "completions", completion(long))
    assert_same(got, ask(reference.url, "completions", completion(long)))
    held = len(short) // BLOCK * BLOCK

    def counted() -> bool:
        return (
            since() == {"remote/long": 1}
            and disagg.count("PrefillWorker", READS, outcome="read") == reads + 1
            and disagg.count("PrefillWorker", COMPUTED) == computed + len(long) - held
        )

    eventually(counted, timeout_s=5, what=f"{held} tokens were read")
    # What was read is in the prefill engine's cache, and it is right: another decode
    # engine would get it from there.
    longer = long + prompt_ids(LIMIT + 100, seed=502)
    got = ask(disagg.url, "completions", completion(longer))
    assert_same(got, ask(reference.url, "completions", completion(longer)))
    assert not disagg.errors(), disagg.errors()
