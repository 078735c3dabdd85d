"""In which order vLLM's own block pool hands out blocks, with our queue in it."""

import random
import statistics

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, make_block_hash_with_group_id

from benchmarks.used_pools import JOB_BLOCKS, Load, runs
from dynamo_lite.vllm.engine.free_blocks import FreeRuns, hand_out_runs


def pool_of(blocks: int) -> BlockPool:
    """Block 0 is vLLM's null block."""
    pool = BlockPool(blocks + 1, True, 16)
    hand_out_runs(pool)
    assert isinstance(pool.free_block_queue, FreeRuns)
    return pool


def ids(blocks: list[KVCacheBlock]) -> list[int]:
    return [block.block_id for block in blocks]


class Cached:
    """Gives blocks back as full ones that the prefix cache knows."""

    def __init__(self, pool: BlockPool):
        self._pool, self._count = pool, 0

    def free(self, blocks: list[KVCacheBlock]) -> None:
        for block in blocks:
            if block.block_hash is None:
                self._count += 1
                hashed = BlockHash(self._count.to_bytes(32, "little"))
                key = make_block_hash_with_group_id(hashed, 0)
                block.set_block_hash(key)
                self._pool.cached_block_hash_to_block.insert(key, block)
        self._pool.free_blocks(reversed(blocks))


def test_what_was_freed_first_is_evicted_first():
    pool = pool_of(400)
    cached = Cached(pool)
    held = [pool.get_new_blocks(100) for _ in range(4)]
    for number in (2, 0, 3, 1):
        cached.free(held[number])
    # The end of a prompt goes before its beginning.
    assert ids(pool.get_new_blocks(60)) == ids(held[2])[40:]
    assert ids(pool.get_new_blocks(40)) == ids(held[2])[:40]
    assert ids(pool.get_new_blocks(100)) == ids(held[0])


def test_blocks_that_nothing_is_cached_in_go_first():
    pool = pool_of(400)
    cached = Cached(pool)
    held = [pool.get_new_blocks(100) for _ in range(4)]
    for blocks in (held[0], held[1], held[3]):
        cached.free(blocks)
    pool.free_blocks(reversed(held[2]))
    assert ids(pool.get_new_blocks(100)) == ids(held[2])


def test_small_allocations_leave_long_runs_whole():
    pool = pool_of(1000)
    cached, everything = Cached(pool), pool.get_new_blocks(1000)
    gaps = [everything[i] for i in (10, 20, 21, 30, 31, 32, 33)]
    cached.free(everything[500:600])
    cached.free(gaps)
    cached.free(everything[600:])
    taken = ids(pool.get_new_blocks(4)) + [pool.get_new_blocks(1)[0].block_id for _ in range(3)]
    assert taken[:4] == ids(gaps[3:])
    assert set(taken[4:]) == set(ids(gaps[:3]))


def test_an_allocation_is_split_rather_than_taken_from_what_was_used_lately():
    pool = pool_of(200)
    cached = Cached(pool)
    old, between, young = (pool.get_new_blocks(n) for n in (120, 1, 79))
    cached.free([b for i, b in enumerate(old) if i not in (40, 80)])
    cached.free(young)
    taken = ids(pool.get_new_blocks(75))
    assert not set(taken) & set(ids(young))
    assert len(taken) == 75 and taken == sorted(taken)
    assert between[0].block_id not in taken


def test_all_that_is_free_can_be_had_and_no_more():
    pool = pool_of(64)
    everything = pool.get_new_blocks(64)
    pool.free_blocks(everything[::2])
    with pytest.raises(ValueError, match="33"):
        pool.get_new_blocks(33)
    assert ids(pool.get_new_blocks(32)) == ids(everything[::2])
    assert pool.get_num_free_blocks() == 0


def test_no_block_is_lost_or_handed_out_twice():
    pool = pool_of(300)
    cached, chance = Cached(pool), random.Random(1)
    held: list[list[KVCacheBlock]] = []
    in_use: list[int] = []
    for _ in range(3000):
        count = chance.choice((1, 1, 1, 2, 5, 17, 60))
        if count <= pool.get_num_free_blocks():
            held.append(pool.get_new_blocks(count))
        if held and (chance.random() < 0.5 or count > pool.get_num_free_blocks()):
            blocks = held.pop(chance.randrange(len(held)))
            if chance.random() < 0.3:
                pool.free_blocks(reversed(blocks))
            else:
                cached.free(blocks)
        in_use = [block.block_id for blocks in held for block in blocks]
        assert len(in_use) == len(set(in_use)) == 300 - pool.get_num_free_blocks()
    free = ids(pool.free_block_queue.get_all_free_blocks())
    assert sorted(free + in_use) == list(range(1, 301))


def test_a_block_that_is_found_in_the_cache_is_not_handed_out():
    pool = pool_of(100)
    cached = Cached(pool)
    blocks = pool.get_new_blocks(100)
    cached.free(blocks)
    pool.get_new_blocks(1)
    hit = blocks[90:99]
    pool.touch(hit)
    taken = [pool.get_new_blocks(1)[0] for _ in range(40)] + pool.get_new_blocks(50)
    assert not set(ids(taken)) & set(ids(hit))


def test_pools_that_served_a_mixed_load_give_jobs_as_few_descriptors_as_fresh_ones():
    fresh = Load(jobs=1, seam=hand_out_runs, probes=1).run()
    assert [runs(job) for job in fresh.found] == [1]
    used = Load(jobs=300, seam=hand_out_runs, probes=20).run()
    assert len(used.found) == 20
    assert statistics.mean(map(runs, used.found)) <= 2
    # What vLLM's own order comes to.
    plain = Load(jobs=300, seam=lambda _: None, probes=20).run()
    assert statistics.mean(map(runs, plain.found)) > JOB_BLOCKS / 2
