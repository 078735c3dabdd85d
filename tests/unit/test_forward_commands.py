"""What `dynamo-lite join` and `dynamo-lite sidecar` refuse, before they start anything."""

import pytest

from dynamo_lite.cli.cli import app
from dynamo_lite.protocol.errors import ConfigError

GOOD = {
    "--url": "http://127.0.0.1:8100",
    "--role": "decode",
    "--protocol": "nixl",
    "--etcd-url": "http://127.0.0.1:1",
}


def mistakes(*words: str) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        app(list(words), standalone_mode=False)
    return refused.value.mistakes


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
        ({"--notify-port": "0"}, "--notify-port 0: expected 1 to 65535"),
        ({"--url": "http://h:50000", "--protocol": "kvt-batch"}, "at port 70000"),
        ({"--namespace": "A B"}, "--namespace A B: not a namespace"),
        ({"--etcd-url": "ftp://h"}, "etcd URL ftp://h: expected"),
    ],
)
def test_bad_input_of_join_is_refused(given: dict[str, str], problem: str):
    words = [word for pair in {**GOOD, **given}.items() for word in pair]
    [mistake] = mistakes("join", *words)
    assert problem in mistake


def test_all_mistakes_are_named_at_once():
    words = ["--url", "h", "--role", "x", "--protocol", "y", "--transfer-port", "0"]
    assert len(mistakes("join", *words)) == 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--protocol neuron-static", "expected one of nixl"),
        ("--protocol moriio-read", "--transfer-host"),
        ("--protocol moriio-read --transfer-host ::", "not that of all interfaces"),
        ("--decode ftp://x", "expected http://HOST:PORT or https://"),
        ("--allow-prefiller 10.0.0.0/99", "is not an address, network (CIDR) or host name"),
        ("--tls-cert none.pem", "tls-cert and tls-key go together"),
    ],
)
def test_bad_input_of_a_sidecar_is_refused(words: str, said: str):
    assert said in "; ".join(mistakes("sidecar", *words.split()))
