"""Converts KV tensors, as shapes and strides, to regions. Pure.

The first dimension of a tensor counts blocks, whatever their order in memory.
"""

from collections.abc import Sequence

from dynamo_lite.protocol.records import KvArray, KvRegion

#: Dimension in vLLM's views of an attention layer: [blocks, heads, tokens, values].
_DIMENSIONS = 4


def block_order(
    shape: Sequence[int], strides: Sequence[int], num_blocks: int, heads_dim: int | None = None
) -> str:
    """Returns the order of elements inside a block as text; equal layouts have equal texts.

    If a block can be cut into heads (dimension `heads_dim`), the text does not depend on
    their number.
    """
    shape, strides, heads_dim = _whole_blocks(shape, strides, num_blocks, heads_dim)
    sizes = [str(size) for size in shape[1:]]
    steps = [str(stride) for stride in strides[1:]]
    outermost = _is_outermost(shape, strides, heads_dim)
    if heads_dim is not None and outermost:
        del sizes[heads_dim - 1], steps[heads_dim - 1]
    elif heads_dim is not None:
        sizes[heads_dim - 1] += " heads"
    text = f"[{', '.join(sizes)}]/[{', '.join(steps)}]"
    return f"heads of {text}" if outermost else text


def plain_array(
    shape: Sequence[int], strides_bytes: Sequence[int], item_bytes: int
) -> KvArray | None:
    """Describes a block whose last three dimensions are heads, tokens and values.

    They may be in any order in memory. Returns None if the values of one head and token are
    not contiguous.
    """
    heads, tokens, values = shape[-3:]
    if values > 1 and strides_bytes[-1] != item_bytes:
        return None
    return KvArray(
        offset=0,
        # The stride of a single head or token is arbitrary; equal blocks must compare equal.
        head_stride=strides_bytes[-3] if heads > 1 else tokens * values * item_bytes,
        group_stride=strides_bytes[-2] if tokens > 1 else values * item_bytes,
        item_stride=0,
        group_tokens=1,
        items=1,
        item_bytes=values * item_bytes,
    )


def region_of_tensor(
    layer: str,
    *,
    address: int,
    shape: Sequence[int],
    strides_bytes: Sequence[int],
    item_bytes: int,
    num_blocks: int,
    heads_dim: int | None = None,
    first_head: int = 0,
    tokens: int = 0,
    arrays: tuple[KvArray, ...] = (),
    group: int = 0,
) -> KvRegion:
    """Returns the region of one layer's KV tensor, for any backend's layout.

    heads_dim: the dimension that counts KV heads, if there is one. first_head: index of the
    first one in the model. tokens, arrays: content of a block, if that is known.
    group: the layer's KV group.

    The first dimension counts blocks, or a kernel's smaller blocks, and a block is a run of
    these. The dimensions behind it must be dense, in any order. Raises ValueError with the shape
    for anything else.
    """
    what = f"layer {layer}: KV tensor of shape {tuple(shape)}, strides {tuple(strides_bytes)}"
    if tokens and heads_dim is not None:
        _check_kernel_blocks(what, shape, num_blocks, heads_dim, tokens)
    shape, strides_bytes, heads_dim = _whole_blocks(shape, strides_bytes, num_blocks, heads_dim)
    if not shape or shape[0] != num_blocks:
        raise ValueError(f"{what}: its first dimension is not {num_blocks} blocks")
    inner = sorted(zip(strides_bytes[1:], shape[1:], strict=True))
    block_bytes = item_bytes
    for stride, size in inner:
        if size == 1:
            continue
        if stride != block_bytes:
            raise ValueError(f"{what}: a block is not dense")
        block_bytes *= size
    if strides_bytes[0] < block_bytes:
        raise ValueError(f"{what}: blocks overlap")
    head_bytes = 0
    if heads_dim is not None and _is_outermost(shape, strides_bytes, heads_dim):
        head_bytes = block_bytes // shape[heads_dim]
    return KvRegion(
        layer=layer,
        base=address,
        stride_bytes=strides_bytes[0],
        block_bytes=block_bytes,
        first_head=first_head,
        head_bytes=head_bytes,
        tokens=tokens if arrays else 0,
        arrays=arrays,
        group=group,
    )


def _is_outermost(shape: Sequence[int], strides: Sequence[int], heads_dim: int | None) -> bool:
    """Whether a block is its heads one after the other, each of them contiguous."""
    if heads_dim is None:
        return False
    inner = [dim for dim in range(1, len(shape)) if shape[dim] > 1]
    return shape[heads_dim] == 1 or strides[heads_dim] == max(strides[dim] for dim in inner)


def _whole_blocks(
    shape: Sequence[int], strides: Sequence[int], num_blocks: int, heads_dim: int | None
) -> tuple[Sequence[int], Sequence[int], int | None]:
    """Groups kernel blocks into blocks of vLLM's KV manager: shape, strides, heads_dim.

    An attention kernel may use smaller blocks than `block-size`. Then the first dimension
    counts these, and each of the manager's blocks is a run of them, in the order of its
    tokens. They become the first dimension inside a block, unless all tokens of a block have
    the same stride. Other tensors are returned unchanged.
    """
    each = _kernel_blocks(shape, num_blocks, heads_dim)
    if each == 1 or heads_dim is None:
        return shape, strides, heads_dim
    tokens_dim = heads_dim + 1
    step = strides[0]
    if step == shape[tokens_dim] * strides[tokens_dim]:
        whole = [num_blocks, *shape[1:]]
        whole[tokens_dim] *= each
        return whole, [each * step, *strides[1:]], heads_dim
    return [num_blocks, each, *shape[1:]], [each * step, *strides], tokens_dim


def _kernel_blocks(shape: Sequence[int], num_blocks: int, heads_dim: int | None) -> int:
    """Number of kernel blocks per block in a tensor [kernel blocks, heads, tokens, values]."""
    if heads_dim != 1 or len(shape) != _DIMENSIONS or shape[0] % num_blocks:
        return 1
    return shape[0] // num_blocks


def _check_kernel_blocks(
    what: str, shape: Sequence[int], num_blocks: int, heads_dim: int, tokens: int
) -> None:
    each = _kernel_blocks(shape, num_blocks, heads_dim)
    if each > 1 and each * shape[heads_dim + 1] != tokens:
        size = shape[heads_dim + 1]
        raise ValueError(
            f"{what}: {each} kernel blocks of {size} tokens are not a block of {tokens} tokens;"
            f" use block-size: {size}"
        )
