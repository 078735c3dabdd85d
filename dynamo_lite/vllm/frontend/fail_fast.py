"""Refuses bodies early: at the first bad element of a list, and batches that are too long."""

from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI, Request
from pydantic_core import SchemaValidator
from starlette.datastructures import State
from vllm import envs
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response

#: Schemas of pydantic-core that have the option `fail_fast`.
_LISTS = ("list", "tuple", "set", "frozenset")


def fail_fast_routes(app: FastAPI) -> None:
    """Changes the validators of this app's routes, not vLLM's request types.

    By default pydantic collects every error of every element, for each alternative of its type:
    500 kB of `messages: [{}, {}, ...]` are 2.5 million errors, which block vLLM's event loop for
    17 s. The client only gets the first ones, so nothing is lost.
    """
    for route in app.routes:
        adapter = getattr(getattr(route, "body_field", None), "_type_adapter", None)
        if adapter is not None:
            # Prebuilt validators of nested models would still collect all errors.
            changed = _changed(adapter.core_schema)
            adapter.validator = SchemaValidator(changed, _use_prebuilt=False)


def limit_batches(state: State) -> None:
    """Limits `/v1/chat/completions/batch` as vLLM limits lists of prompts.

    vLLM renders all conversations on the event loop, then sends all of them to workers.
    """
    serving = getattr(state, "openai_serving_chat_batch", None)
    if serving is None:
        return

    async def limited(request: Any, raw_request: Request | None = None) -> Any:
        count, most = len(request.messages), envs.VLLM_MAX_COMPLETION_PROMPTS
        if count > most:
            text = (
                f"{count} conversations in one batch; at most VLLM_MAX_COMPLETION_PROMPTS: {most}"
            )
            return create_error_response(text, param="messages")
        return await serving.create_batch_chat_completion(request, raw_request)

    # What the route asks the app's state for.
    state.openai_serving_chat_batch = SimpleNamespace(create_batch_chat_completion=limited)


def _changed(schema: Any) -> Any:
    if isinstance(schema, dict):
        changed = {key: _changed(value) for key, value in schema.items()}
        if schema.get("type") in _LISTS:
            changed["fail_fast"] = True
        return changed
    if isinstance(schema, list | tuple):
        return type(schema)(_changed(value) for value in schema)
    return schema
