"""Simulated servers that a test may kill, freeze and start again, as the real ones."""

from tests.simulation.network.network import Network
from tests.simulation.servers.etcd import EtcdServer
from tests.simulation.servers.etcd_backend import ETCD_URL
from tests.simulation.servers.etcd_data import EtcdData
from tests.simulation.servers.nats_server import NatsServer


class SimNats:
    """As much of `tests.servers.PrivateServer` as the contract suites use."""

    def __init__(self, network: Network, name: str = "nats", port: int = 4222):
        self.network, self._name, self._port = network, name, port
        self.url = f"nats://{name}:{port}"
        self._start()

    def _start(self) -> None:
        self.process = self.network.loop.add_process(self._name)
        self.server = NatsServer(self.network, self.process, self._port)

    async def kill(self) -> None:
        self.process.kill()

    async def restart(self) -> None:
        self.process.kill()
        self._start()

    def freeze(self) -> None:
        self.process.pause()

    def thaw(self) -> None:
        self.process.resume()


class SimEtcd:
    """As `SimNats`. data: what it has."""

    url = ETCD_URL

    def __init__(self, network: Network):
        self._network, self.data = network, EtcdData()
        self._start()

    def _start(self) -> None:
        self.process = self._network.loop.add_process("etcd")
        self.server = EtcdServer(self._network, self.process, self.data)

    async def kill(self) -> None:
        self.process.kill()

    async def restart(self, *, wiped: bool = False, same_cluster: bool = True) -> None:
        self.process.kill()
        if wiped:
            self.data = self.data.wiped(same_cluster=same_cluster)
        self._start()

    def freeze(self) -> None:
        self.process.pause()

    def thaw(self) -> None:
        self.process.resume()
