"""What a host without any secret tries at every port that it is told of: `rig.stranger` runs this.

    python -m tests.hosts.stranger HOST:PORT...

Prints, as JSON by port, what it has heard without TLS and over TLS.
"""

import contextlib
import json
import secrets
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from random import Random

from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.generate import Hello
from dynamo_lite.request_plane.framing import frame
from tests.hostile import MESSAGES, tell

#: Open connections that say nothing, to each port, while the rest is tried.
_IDLE = 40
#: A server on a busy machine answers within it.
_SILENCE_S = 4.0
#: Messages to each port.
_AT_ONCE = 5


def _messages() -> Iterator[bytes]:
    yield from MESSAGES
    yield Random(7).randbytes(5000)
    yield frame(encode(Hello(client_id="stranger", proof=secrets.token_bytes(40))))
    yield frame(encode(Hello(client_id="stranger")))
    for key in ("", "Authorization: Bearer guessed\r\n"):
        body = '{"model": "tiny", "prompt": "a", "max_tokens": 1}'
        yield (
            f"POST /v1/completions HTTP/1.0\r\n{key}Content-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{body}"
        ).encode()


def _try(place: tuple[str, int], heard: dict[str, list[str]]) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(_IDLE):
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_connection(place, timeout=5))
        said: list[bytes] = []
        pool = stack.enter_context(ThreadPoolExecutor(_AT_ONCE))
        for tls in (False, True):
            greets = b"".join(said).startswith(b"INFO ")
            ask = partial(tell, place, tls=tls, silence_s=_SILENCE_S, greets=greets)
            said.append(b"".join(pool.map(ask, _messages())))
    heard[f"{place[0]}:{place[1]}"] = [one.decode("latin-1") for one in said]


def main() -> None:
    heard: dict[str, list[str]] = {}
    places = [(host, int(port)) for host, _, port in (a.rpartition(":") for a in sys.argv[1:])]
    tries = [threading.Thread(target=_try, args=(place, heard)) for place in places]
    for one in tries:
        one.start()
    for one in tries:
        one.join()
    print(json.dumps(heard))


if __name__ == "__main__":
    main()
