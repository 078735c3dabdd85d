"""A running engine leaves its role: when that is safe, and what it becomes.

It happens between two steps, when no request has blocks and the half has nothing open: no remote
prefill, no transfer, no link test. The half's session ends first, so that nothing is granted any
more; then all ranks open the other role's rank on the same KV memory, under a new NIXL agent; then
the other half begins. Whatever was addressed to the old engine id reaches no process.
"""

from pathlib import Path

from vllm.v1.core.block_pool import BlockPool

from dynamo_lite.disagg.decode.scheduler import DecodeScheduler
from dynamo_lite.disagg.engine_config import EngineConfig, read_engine_config
from dynamo_lite.disagg.messages import NewRole
from dynamo_lite.disagg.prefill.scheduler import PrefillScheduler
from dynamo_lite.disagg.role_orders import RoleOrders
from dynamo_lite.protocol.errors import DynamoLiteError, ProtocolError
from dynamo_lite.protocol.prefill import ChangeRole


class RoleChange:
    """At the engine's scheduler. config_file: of the engine's first role."""

    def __init__(self, orders: RoleOrders, config_file: Path):
        self.orders, self._folder = orders, config_file.parent

    def begin(
        self, half: DecodeScheduler | PrefillScheduler, pool: BlockPool, present: EngineConfig
    ) -> tuple[EngineConfig, NewRole] | None:
        """Ends the session of the active half if its role may end. Returns the new config and what
        the ranks are to do; None: there is no order, or it was refused."""
        order = self.orders.take()
        if order is None:
            return None
        file = self._folder / order.config_file
        try:
            new = _new_config(order, file, present)
        except DynamoLiteError as exc:
            self.orders.refuse(str(exc))
            return None
        # vLLM keeps one block for itself.
        used = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        why = half.unfinished or (f"{used} blocks of its KV are in use" if used else "")
        if why:
            self.orders.refuse(why)
            return None
        half.bridge.close()
        return new, NewRole(str(file))


def _new_config(order: ChangeRole, file: Path, present: EngineConfig) -> EngineConfig:
    """Raises StartupError or ProtocolError where the file is not what the order names."""
    new = read_engine_config(str(file))
    if new.engine_id != order.engine_id or new.namespace != present.namespace:
        raise ProtocolError(f"{file} is not the config of engine {order.engine_id}")
    if new.engine_id == present.engine_id or type(new.role) is type(present.role):
        raise ProtocolError(f"{file}: a new role needs another role and a new engine id")
    return new
