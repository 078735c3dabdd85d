"""How a job's blocks lie in the pools of two engines that have served a mixed load.

The pools are vLLM's own (KVCacheManager, BlockPool), without engines around them: prompts of
all lengths, a part of them growing chats, are prefilled in chunks by turns and decoded beside
one another, block by block; what is free stays in the prefix cache until it is evicted.
"""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

BLOCK = 16
JOB_BLOCKS = 128
DECODE_BLOCKS, PREFILL_BLOCKS = 4000, 2000
#: Of the decode engine; of the prefill engine.
RUNNING, PREFILLING = 16, 3
CHUNK_TOKENS = 2048
CHATS, CHAT_SHARE = 12, 0.4
#: Uncached tokens, above which a prompt is prefilled by the other engine.
REMOTE_TOKENS = 256
MAX_TOKENS = 8000

Seam = Callable[[BlockPool], object]


@dataclass(frozen=True)
class Job:
    """Blocks of a prompt of JOB_BLOCKS blocks, in its order."""

    local_ids: list[int]
    remote_ids: list[int]


@dataclass
class _Remote:
    """A prompt at both engines. probe: whether its blocks are looked at."""

    decode: Request
    prefill: Request
    output_tokens: int
    probe: bool
    begun: bool = False


@dataclass
class Load:
    """Plays `jobs` prompts over two pools. seam: what is done to a pool before its first use.

    probes: so many of the prompts are jobs of JOB_BLOCKS blocks, the last one of every five;
    `found` has them, oldest first. hits: prompt tokens that the decode engine's cache had.
    """

    jobs: int
    seam: Seam
    probes: int
    seed: int = 1
    found: list[Job] = field(default_factory=list[Job])
    hit_tokens: int = 0
    tokens: int = 0

    def __post_init__(self) -> None:
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self._random = random.Random(self.seed)
        self._decode = self._manager(DECODE_BLOCKS)
        self._prefill = self._manager(PREFILL_BLOCKS)
        self._chats = [self._text(self._random.choice((64, 512, 1024))) for _ in range(CHATS)]
        self._at_prefill: list[_Remote] = []
        self._decoding: list[tuple[Request, int]] = []
        self._next = 0

    def run(self) -> "Load":
        while self._next < self.jobs or self._decoding or self._at_prefill:
            while self._next < self.jobs and self._arrive():
                self._next += 1
            self._prefill_step()
            self._decode_step()
        return self

    def _manager(self, blocks: int) -> KVCacheManager:
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float16)
        manager = KVCacheManager(
            KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
            max_model_len=1 << 20,
            scheduler_block_size=BLOCK,
            hash_block_size=BLOCK,
        )
        self.seam(manager.block_pool)
        return manager

    def _text(self, tokens: int) -> list[int]:
        return [self._random.randrange(1 << 30) for _ in range(tokens)]

    def _request(self, name: str, tokens: list[int]) -> Request:
        return Request(
            request_id=name,
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            block_hasher=self._hasher,
        )

    def _prompt(self) -> list[int]:
        if self._random.random() < CHAT_SHARE:
            number = self._random.randrange(CHATS)
            self._chats[number] += self._text(self._random.choice((32, 200, 600)))
            if len(self._chats[number]) > MAX_TOKENS:
                self._chats[number] = self._text(512)
            return list(self._chats[number])
        return self._text(int(min(MAX_TOKENS, max(8, self._random.lognormvariate(6, 1.3)))))

    def _arrive(self) -> bool:
        """Admits one prompt to the decode engine, if it has room for it."""
        if len(self._decoding) + len(self._at_prefill) >= RUNNING:
            return False
        left = self.jobs - self._next
        probe = left <= 5 * self.probes and left % 5 == 1
        tokens = self._text(JOB_BLOCKS * BLOCK) if probe else self._prompt()
        request = self._request(f"d{self._next}", tokens)
        known, hits, _ = self._decode.get_computed_blocks(request)
        external = len(tokens) - 1 - hits
        remote = external > REMOTE_TOKENS
        blocks = self._decode.allocate_slots(
            request,
            0 if remote else len(tokens) - hits,
            hits,
            known,
            num_external_computed_tokens=external if remote else 0,
            delay_cache_blocks=remote,
            full_sequence_must_fit=True,
        )
        if blocks is None:
            return False
        self.hit_tokens += hits
        self.tokens += len(tokens)
        output = self._random.choice((4, 30, 100, 400)) if self._random.random() > 0.05 else 1500
        if remote:
            there = self._request(f"p{self._next}", tokens[:-1])
            self._at_prefill.append(_Remote(request, there, output, probe))
        else:
            request.num_computed_tokens = len(tokens)
            self._decoding.append((request, output))
        return True

    def _prefill_step(self) -> None:
        budget = CHUNK_TOKENS
        for job in self._at_prefill[:PREFILLING]:
            request, hits, known = job.prefill, 0, None
            if not job.begun:
                known, hits, _ = self._prefill.get_computed_blocks(request)
            count = min(budget, request.num_tokens - request.num_computed_tokens - hits)
            if not count or not self._prefill.allocate_slots(
                request, count, hits, known, full_sequence_must_fit=not job.begun
            ):
                return
            job.begun = True
            request.num_computed_tokens += hits + count
            budget -= count
            if request.num_computed_tokens >= request.num_tokens:
                self._handed_over(job)

    def _handed_over(self, job: _Remote) -> None:
        if job.probe:
            local = self._prefill.get_block_ids(job.prefill.request_id)[0]
            remote = self._decode.get_block_ids(job.decode.request_id)[0]
            self.found.append(Job(local[:JOB_BLOCKS], remote[:JOB_BLOCKS]))
        self._prefill.free(job.prefill)
        self._at_prefill.remove(job)
        job.decode.num_computed_tokens = job.decode.num_prompt_tokens - 1
        self._decode.cache_blocks(job.decode, job.decode.num_computed_tokens)
        self._decoding.append((job.decode, job.output_tokens))

    def _decode_step(self) -> None:
        """One token for each; when there are no blocks for it, the last request is given up."""
        running, self._decoding = self._decoding, []
        while running:
            request, left = running.pop(0)
            request.append_output_token_ids(self._random.randrange(1 << 30))
            count = request.num_tokens - request.num_computed_tokens
            while not (blocks := self._decode.allocate_slots(request, count)) and running:
                self._decode.free(running.pop()[0])
            if blocks is None or left == 1:
                self._decode.free(request)
                continue
            request.num_computed_tokens += count
            self._decoding.append((request, left - 1))


def runs(job: Job) -> int:
    """Runs of blocks that follow one another on both sides: descriptors of a dense region."""
    pairs = sorted(zip(job.local_ids, job.remote_ids, strict=True))
    steps = itertools.pairwise(pairs)
    return 1 + sum(after != (here + 1, there + 1) for (here, there), after in steps)
