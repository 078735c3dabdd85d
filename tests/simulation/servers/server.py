"""What the simulated servers have in common: connections, calls, answers."""

from typing import Any

from dynamo_lite.protocol.errors import DynamoLiteError
from tests.simulation.loop.process import SimProcess
from tests.simulation.network.channel import End
from tests.simulation.network.network import Network


class ClientConnection:
    """One client's connection, as the server sees it. `client`: its process's name."""

    def __init__(self, server: "SimServer", end: End):
        self._server = server
        self._end = end
        self.client = end.peer.process.name

    def __repr__(self) -> str:
        return f"ClientConnection({self._end!r})"

    @property
    def is_open(self) -> bool:
        return self._end.is_open

    def start(self) -> None:
        self._end.send("hello")
        self._end.start(self._take, lambda _: self._server.left(self))

    def send(self, item: Any) -> None:
        self._end.send(item)

    def _take(self, item: Any) -> None:
        match item:
            case ("call", number, operation, arguments):
                self.send(("answer", number, *self._answer(operation, arguments)))
            case _:
                self._server.take(self, item)

    def _answer(self, operation: str, arguments: tuple[Any, ...]) -> tuple[Any, Any]:
        try:
            return self._server.call(self, operation, arguments), None
        except (DynamoLiteError, LookupError) as exc:
            return None, exc


class SimServer:
    """A server that runs as `process` on `port`, until that process dies."""

    def __init__(self, network: Network, process: SimProcess, port: int):
        self.network = network
        self.loop = network.loop
        self.process = process
        self.connections: dict[ClientConnection, None] = {}
        process.run(network.listen, process, self._accept, port)

    def call(self, connection: ClientConnection, operation: str, arguments: tuple[Any, ...]) -> Any:
        """Answers a call, at once. A DynamoLiteError or LookupError is the answer, too."""
        return getattr(self, f"on_{operation}")(connection, *arguments)

    def take(self, connection: ClientConnection, item: Any) -> None:
        """Takes what is not a call: (name, arguments...)."""
        name, *arguments = item
        getattr(self, f"on_{name}")(connection, *arguments)

    def left(self, connection: ClientConnection) -> None:
        """The client closed, or its connection broke."""
        self.connections.pop(connection, None)

    def _accept(self, end: End) -> None:
        connection = ClientConnection(self, end)
        self.connections[connection] = None
        connection.start()
