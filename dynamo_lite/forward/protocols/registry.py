"""All protocols, by the name that the configuration uses."""

from collections.abc import Mapping

from dynamo_lite.forward.protocols import kvt, mooncake, moriio, neuron, nixl, sglang
from dynamo_lite.forward.protocols.base import ForwardProtocol

PROTOCOLS: Mapping[str, ForwardProtocol] = {
    protocol.name: protocol
    for protocol in (
        nixl.PULL,
        nixl.PUSH,
        mooncake.MOONCAKE,
        mooncake.LLUMNIX,
        moriio.READ,
        moriio.WRITE,
        sglang.BOOTSTRAP,
        neuron.STATIC,
        neuron.DYNAMIC,
        kvt.BATCH,
        kvt.STAGED,
    )
}
