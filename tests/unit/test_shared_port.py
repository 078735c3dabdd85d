"""One port for several processes: the supervisor's reservation and the Frontends' sockets."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.runtime.listening import bind
from dynamo_lite.serve.config import ServiceConfig
from dynamo_lite.serve.services.services import FRONTEND
from dynamo_lite.serve.startup_checks import hold_port

HOST = "127.0.0.1"


def frontend(workers: int, port: int = 0, host: str = HOST) -> ServiceConfig:
    options = {"host": host, "port": port, "router": "kv"}
    return ServiceConfig(service=FRONTEND, workers=workers, env={}, options=options, flags={})


@contextmanager
def held_port(service: ServiceConfig) -> Iterator[ServiceConfig]:
    with ExitStack() as stack:
        yield hold_port(service, stack)


def test_a_reserved_port_is_in_use_for_all_others():
    with held_port(frontend(2)) as service:
        port = service.options["port"]
        with pytest.raises(StartupError, match=f"{HOST}:{port}.*in use"):
            bind(HOST, port)
        with (
            pytest.raises(StartupError, match=f"Frontend.port: cannot .* {HOST}:{port}.*in use"),
            held_port(frontend(3, port)),
        ):
            pass
    with bind(HOST, port):
        pass


def test_the_port_of_another_server_cannot_be_shared():
    with bind(HOST, 0, shared=True) as other:
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(StartupError, match="in use"), held_port(frontend(2, port)):
            pass


@pytest.mark.parametrize("workers", [0, 1])
def test_a_single_process_binds_its_port_itself(workers: int):
    service = frontend(workers)
    with held_port(service) as same:
        assert same is service
