"""The index beside a brute-force one, under random events, losses and restarts."""

import itertools
import random
from collections import Counter

import pytest

from dynamo_lite.routing.kv_chain import chain_hashes, extend, root_hash
from dynamo_lite.routing.kv_index import KvIndex

BLOCK = 2
DEPTH = 5
#: All prompts of DEPTH blocks, of two different blocks.
PROMPTS = [
    tuple(itertools.chain.from_iterable(blocks))
    for blocks in itertools.product([(0, 1), (1, 1)], repeat=DEPTH)
]
CHAINS = {prompt: chain_hashes(prompt, BLOCK) for prompt in PROMPTS}


def hash_of(prefix: tuple[int, ...]) -> int:
    return chain_hashes(prefix, BLOCK)[-1]


class Engine:
    """A worker's engine: a prefix cache with duplicates, and the events of it."""

    def __init__(self, index: KvIndex, worker: int):
        self.index, self.worker = index, worker
        self.held: Counter[tuple[int, ...]] = Counter()
        self.deaf = False  # its events are lost

    def store(self, prompt: tuple[int, ...], first: int, end: int) -> None:
        """Blocks first to end - 1; the one before them is held, or there is none."""
        self.held.update(prompt[: BLOCK * (i + 1)] for i in range(first, end))
        if not self.deaf:
            self.index.stored(self.worker, CHAINS[prompt][first:end])

    def remove(self, prefix: tuple[int, ...]) -> None:
        self.held[prefix] -= 1
        if not self.deaf and not self.held[prefix]:
            self.index.removed(self.worker, [hash_of(prefix)])

    def clear(self) -> None:
        self.held.clear()
        if not self.deaf:
            self.index.leave(self.worker)

    def repair(self) -> None:
        self.deaf = False
        self.index.leave(self.worker)
        self.index.stored(self.worker, [hash_of(p) for p, count in self.held.items() if count > 0])

    def longest(self, prompt: tuple[int, ...]) -> int:
        """Block by block: what is true."""
        count = 0
        while count < DEPTH and self.held[prompt[: BLOCK * (count + 1)]] > 0:
            count += 1
        return count


def play(engine: Engine, rng: random.Random) -> None:
    """One random thing that an engine may do."""
    held = [prefix for prefix, count in engine.held.items() if count > 0]
    # As vLLM: the end of a prompt goes first.
    ends = [a for a in held if engine.held[a] > 1 or not any(b[: len(a)] == a != b for b in held)]
    match rng.choice(["store"] * 5 + ["remove"] * 4 + ["lose", "repair", "clear"]):
        case "store":
            prompt = rng.choice(PROMPTS)
            first = rng.randint(0, engine.longest(prompt))
            if first < DEPTH:
                engine.store(prompt, first, rng.randint(first + 1, DEPTH))
        case "remove" if ends:
            engine.remove(rng.choice(ends))
        case "lose":
            engine.deaf = True
        case "repair":
            engine.repair()
        case "clear" if rng.random() < 0.2:
            engine.clear()


@pytest.mark.parametrize("seed", range(40))
def test_it_is_a_brute_force_oracle(seed: int):
    rng, index = random.Random(seed), KvIndex(BLOCK, 1000)
    engines = [Engine(index, worker) for worker in range(4)]
    incarnations = itertools.count(10)
    for _ in range(100):
        number = rng.randrange(len(engines))
        engine = engines[number]
        if rng.random() < 0.03:  # it dies and comes back empty
            index.leave(engine.worker)
            engines[number] = Engine(index, next(incarnations))
        else:
            play(engine, rng)
        check(index, [engine for engine in engines if not engine.deaf])
    for engine in engines:
        index.leave(engine.worker)
    assert len(index) == 0
    assert not any(index.match(chain) for chain in CHAINS.values())


def check(index: KvIndex, engines: list[Engine]) -> None:
    for prompt, chain in CHAINS.items():
        found = index.match(chain)
        for engine in engines:
            assert found.get(engine.worker, 0) == engine.longest(prompt), prompt


def test_it_keeps_within_its_bound_and_claims_nothing_that_is_not_there():
    rng, index = random.Random(1), KvIndex(BLOCK, 500)
    truth: dict[int, set[int]] = {worker: set() for worker in range(8)}
    prompts = [[1_000_000 + 100 * p + i for i in range(20)] for p in range(200)]
    for _ in range(600):
        worker, prompt = rng.randrange(8), rng.choice(prompts)
        index.stored(worker, prompt)
        truth[worker].update(prompt)
        assert len(index) <= 500
        wanted = rng.choice(prompts)
        for worker, count in index.match(wanted).items():
            assert truth[worker].issuperset(wanted[:count])
    assert index.evicted > 0
    assert sum(len(index.held(worker)) > 0 for worker in range(8)) > 1


def test_what_is_matched_outlives_what_is_not():
    index, popular = KvIndex(BLOCK, 1000), list(range(1, 51))
    index.stored(1, popular)
    for prompt in range(200):
        for _ in range(16):
            assert index.match(popular) == {1: 50}
        index.stored(2, [10_000 + 50 * prompt + i for i in range(50)])
    assert index.evicted > 5000


def test_prompts_share_hashes_as_they_may_share_kv():
    tokens = list(range(10))
    plain = chain_hashes(tokens, 2)
    assert len(plain) == 5 and len(set(plain)) == 5
    assert chain_hashes(tokens[:7], 2) == plain[:3]
    assert chain_hashes([9, *tokens[1:]], 2)[1] != plain[1]
    salted = chain_hashes(tokens, 2, cache_salt="a")
    assert not {*plain} & {*salted}


def test_hashes_are_the_same_everywhere():
    """Another version of a worker must name a block as this one does."""
    assert chain_hashes([1, 2, 3, 4], 2) == GOLDEN
    assert chain_hashes([1, 2, 3, 4], 2, cache_salt="s") == GOLDEN_SALTED


GOLDEN = [26125500982393293, 58802947330024952]
GOLDEN_SALTED = [47567483592903719, 59369248434780659]


def test_a_token_id_out_of_range_is_refused():
    with pytest.raises(ValueError, match="token ids"):
        extend(root_hash(), [1, -2], 2)
