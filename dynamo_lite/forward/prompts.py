"""What is known of a prompt. Prompts are text here, not tokens, so amounts are estimates."""

from xxhash import xxh3_64_intdigest

from dynamo_lite.routing.kv_chain import MAX_HASH, ChainHash

#: Bytes per token: about the average of English text and source code.
BYTES_PER_TOKEN = 4
#: Bytes of a prompt's JSON per block, and about how many tokens these are.
BLOCK_BYTES = 256
BLOCK_TOKENS = BLOCK_BYTES // BYTES_PER_TOKEN


def text_chain(prompt: bytes) -> list[ChainHash]:
    """The hashes of all full blocks of a prompt, each of which stands for the prefix up to it."""
    previous, made = 0, list[ChainHash]()
    for start in range(0, len(prompt) - BLOCK_BYTES + 1, BLOCK_BYTES):
        previous = xxh3_64_intdigest(prompt[start : start + BLOCK_BYTES], previous) & MAX_HASH
        made.append(previous)
    return made


def tokens_of(prompt: bytes) -> int:
    """Estimates the number of tokens of a prompt."""
    return -(-len(prompt) // BYTES_PER_TOKEN)
