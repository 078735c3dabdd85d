"""Whether `vllm-rs` can answer chats with the configured parsers.

A parser that does not fit the model fails in each chat, and `vllm-rs` answers 500. So it is
asked once before the Frontend is ready.
"""

import asyncio
import json
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from urllib.parse import urlsplit

from dynamo_lite.protocol.errors import StartupError

_ANSWER_S = 60.0
#: In no vocabulary, so that the chat is refused with 400 after its parsers were made. It
#: reaches no engine.
_NO_TOKEN = (1 << 31) - 1


async def check_chat(url: str, model: str) -> None:
    """Raises StartupError if each chat would be answered with 500, with the reason.

    url: of `vllm-rs`. model: a name under which the model is served.
    """
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Hello"}],
        "stop_token_ids": [_NO_TOKEN],
    }
    try:
        status, answer = await asyncio.to_thread(_post, url, json.dumps(body))
    except (OSError, HTTPException) as exc:
        raise StartupError(f"vllm-rs did not answer a chat: {exc}") from exc
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        raise StartupError(
            f"vllm-rs would answer each chat with {status}: {_message(answer)}. Correct "
            "tool-call-parser and reasoning-parser of the Frontend, or set its edge to python"
        )


def _post(url: str, body: str) -> tuple[int, bytes]:
    """Raises OSError, HTTPException."""
    parts = urlsplit(url)
    connection = HTTPConnection(parts.hostname or "", parts.port, timeout=_ANSWER_S)
    try:
        connection.request(
            "POST", "/v1/chat/completions", body, {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def _message(answer: bytes) -> str:
    """The text of an OpenAI error; the whole answer if it is none."""
    try:
        return str(json.loads(answer)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer.decode(errors="replace")
