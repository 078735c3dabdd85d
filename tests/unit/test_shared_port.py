"""One port for several processes: the supervisor's choice and the Frontends' sockets."""

import contextlib
import socket
from collections import Counter

import pytest

from dynamo_lite.runtime.listening import bind
from dynamo_lite.serve.config import ServiceConfig
from dynamo_lite.serve.services.services import FRONTEND
from dynamo_lite.serve.startup_checks import fixed_port

HOST = "127.0.0.1"


def frontend(workers: int, port: int = 0, host: str = HOST) -> ServiceConfig:
    options = {"host": host, "port": port, "router": "kv"}
    return ServiceConfig(service=FRONTEND, workers=workers, env=(), options=options, flags={})


@pytest.mark.parametrize("host", [HOST, "::1"])
def test_every_process_gets_connections_of_the_same_port(host: str):
    service = fixed_port(frontend(2, host=host))
    with contextlib.ExitStack() as stack:
        port = service.options["port"]
        assert port > 0 and service.options["router"] == "kv"
        listeners = [stack.enter_context(bind(host, port, shared=True)) for _ in range(2)]
        for listener in listeners:
            listener.listen()
            listener.setblocking(False)
        # Each goes to one of two by a hash: that all go to one has a chance of 2 ** -63.
        for _ in range(64):
            stack.enter_context(socket.create_connection((host, port), timeout=5))
        accepted: Counter[int] = Counter()
        for number, listener in enumerate(listeners):
            with contextlib.suppress(BlockingIOError):
                while True:
                    stack.enter_context(listener.accept()[0])
                    accepted[number] += 1
        assert accepted.total() == 64 and min(accepted[0], accepted[1]) > 0


@pytest.mark.parametrize("workers", [0, 1])
def test_a_single_process_binds_its_port_itself(workers: int):
    service = frontend(workers)
    assert fixed_port(service) is service
