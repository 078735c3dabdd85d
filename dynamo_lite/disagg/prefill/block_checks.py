"""Whether the blocks that a job names can be what it says."""

from dynamo_lite.protocol.errors import ProtocolError
from dynamo_lite.protocol.prefill import RemotePrefillRequest
from dynamo_lite.protocol.records import EngineMetadata


def check_blocks(request: RemotePrefillRequest, target: EngineMetadata) -> None:
    """Raises ProtocolError unless the blocks cover the wanted tokens, inside the pool."""
    size = target.block_size_tokens
    first, rest = divmod(request.num_computed_tokens, size)
    wanted = -(-len(request.prompt_token_ids) // size) - first
    if rest or wanted <= 0 or len(request.block_ids) != wanted:
        raise ProtocolError(
            f"{len(request.block_ids)} blocks of {size} tokens for tokens"
            f" {request.num_computed_tokens} to {len(request.prompt_token_ids)}"
        )
    if len(request.prefix_block_ids) not in (0, first):
        raise ProtocolError(
            f"{len(request.prefix_block_ids)} blocks of {size} tokens for the first"
            f" {request.num_computed_tokens} tokens"
        )
    highest = max(request.block_ids + request.prefix_block_ids)
    if highest >= target.num_blocks:
        raise ProtocolError(f"block {highest} of {target.num_blocks}")
