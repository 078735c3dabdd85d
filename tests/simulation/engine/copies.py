"""What a transfer between two agents of one process copies."""

from collections.abc import Callable

from dynamo_lite.protocol.errors import TransferError
from dynamo_lite.transfer.block_map import Descriptors

#: Address on the transfer's own side, address at the peer, length.
Copy = tuple[int, int, int]


def copies_of(
    peer: str,
    local: Descriptors,
    remote: Descriptors,
    covers: Callable[[int, int], bool],
    peer_covers: Callable[[int, int], bool],
) -> list[Copy]:
    """covers, peer_covers: called with an address and a number of bytes; whether that range is
    registered there.

    Raises TransferError.
    """
    if not len(local) or local[:, 1].tolist() != remote[:, 1].tolist():
        raise TransferError(peer, "not started: the two sides differ or are empty")
    copies: list[Copy] = []
    for (here, length, _), (there, _, _) in zip(local.tolist(), remote.tolist(), strict=True):
        if not (covers(here, length) and peer_covers(there, length)):
            raise TransferError(peer, "not started: memory is not registered")
        copies.append((here, there, length))
    return copies
