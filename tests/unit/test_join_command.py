"""What `dynamo-lite join` refuses, before it starts anything."""

import pytest

from dynamo_lite.cli.cli import app
from dynamo_lite.protocol.errors import ConfigError

GOOD = {
    "--url": "http://127.0.0.1:8100",
    "--role": "decode",
    "--protocol": "nixl",
    "--etcd-url": "http://127.0.0.1:1",
}


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"--url": "http://h"}, "--url: expected http://HOST:PORT"),
        ({"--url": "ftp://h:1"}, "--url: expected http://HOST:PORT"),
        ({"--role": "encode"}, "--role encode: accepted are prefill, decode, prefill-decode, both"),
        ({"--protocol": "smoke"}, "--protocol smoke: accepted are nixl, nixl-push"),
        ({"--protocol": "neuron-static"}, "use neuron-dynamic"),
        ({"--transfer-port": "70000"}, "--transfer-port 70000: expected 1 to 65535"),
        ({"--transfer-host": "0.0.0.0"}, "transfer-host is '0.0.0.0': expected the host name or"),
        ({"--transfer-host": "10.0.0.1:6301"}, "without a port or brackets"),
        ({"--notify-port": "0"}, "--notify-port 0: expected 1 to 65535"),
        ({"--url": "http://h:50000", "--protocol": "kvt-batch"}, "at port 70000"),
        ({"--namespace": "A B"}, "--namespace A B: not a namespace"),
        ({"--etcd-url": "ftp://h"}, "etcd URL ftp://h: expected"),
    ],
)
def test_bad_input_is_refused(given: dict[str, str], problem: str):
    words = [word for pair in {**GOOD, **given}.items() for word in pair]
    with pytest.raises(ConfigError) as refused:
        app(["join", *words], standalone_mode=False)
    [mistake] = refused.value.mistakes
    assert problem in mistake


def test_all_mistakes_are_told_at_once():
    words = ["--url", "h", "--role", "x", "--protocol", "y", "--transfer-port", "0"]
    with pytest.raises(ConfigError) as refused:
        app(["join", *words], standalone_mode=False)
    assert len(refused.value.mistakes) == 4
