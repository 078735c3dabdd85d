"""What `dynamo-lite join` and `dynamo-lite sidecar` refuse, before they start anything."""

import pytest
import typer

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
        ({"--url": "http://h"}, "expected http://HOST:PORT"),
        ({"--url": "ftp://h:1"}, "expected http://HOST:PORT"),
        ({"--protocol": "neuron-static"}, "use neuron-dynamic"),
        ({"--transfer-host": "0.0.0.0"}, "transfer-host is '0.0.0.0': expected the host name or"),
        ({"--url": "http://h:50000", "--protocol": "kvt-batch"}, "at port 70000"),
        ({"--namespace": "A B"}, "--namespace A B: not a namespace"),
        ({"--etcd-url": "ftp://h"}, "etcd URL ftp://h: expected"),
    ],
)
def test_bad_input_of_join_is_refused(given: dict[str, str], problem: str):
    words = [word for pair in {**GOOD, **given}.items() for word in pair]
    [mistake] = mistakes("join", *words)
    assert problem in mistake


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (
            {"--role": "encode"},
            "'encode' is not one of 'prefill', 'decode', ",
        ),
        ({"--protocol": "smoke"}, "'smoke' is not one of 'nixl', 'nixl-push'"),
        ({"--transfer-port": "70000"}, "less than or equal to 65535"),
        ({"--notify-port": "0"}, "greater than or equal to 1"),
    ],
)
def test_a_wrong_word_or_number_of_join_is_refused(given: dict[str, str], problem: str):
    words = [word for pair in {**GOOD, **given}.items() for word in pair]
    with pytest.raises(typer.BadParameter) as refused:
        app(["join", *words], standalone_mode=False)
    assert problem in refused.value.message


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--protocol moriio-read", "--transfer-host"),
        ("--protocol moriio-read --transfer-host ::", "not that of all interfaces"),
        ("--decode ftp://x", "expected http://HOST:PORT or https://"),
        ("--allow-prefiller 10.0.0.0/99", "is no address, network (CIDR) or host name"),
        ("--allow-prefiller ,", "--allow-prefiller: '' is no address, network"),
        ("--ca-file none.pem", "--ca-file: no engine uses HTTPS"),
        ("--tls-cert none.pem", "tls-cert and tls-key go together"),
    ],
)
def test_bad_input_of_a_sidecar_is_refused(words: str, said: str):
    assert said in "; ".join(mistakes("sidecar", *words.split()))
