"""`POST /invocations`: takes the request of several routes and finds its type by its fields.

vLLM's own route validates by itself and collects all errors of a body, so this one takes its
place. The types, their order, the handlers and the answers are vLLM's. What its decorators for
SageMaker add is left out: sessions, and the adapter that a header names.
"""

import json
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response
from pydantic import TypeAdapter, ValidationError
from pydantic_core import SchemaValidator
from vllm.config import ModelConfig
from vllm.entrypoints.generate.factories import get_generate_invocation_types
from vllm.entrypoints.pooling.factories import get_pooling_invocation_types
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.instrumentator.basic import base
from vllm.entrypoints.serve.sagemaker.api_router import EndpointFn, GetHandlerFn
from vllm.entrypoints.serve.utils.api_utils import validate_json_request
from vllm.tasks import SupportedTask

PATH = "/invocations"

_ERRORS = (
    HTTPStatus.BAD_REQUEST,
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
    HTTPStatus.INTERNAL_SERVER_ERROR,
)


class _Kind:
    """One type of request, and who answers it."""

    def __init__(self, request_type: Any, handler: GetHandlerFn, endpoint: EndpointFn):
        is_class = isinstance(request_type, type)
        self.name = request_type.__name__ if is_class else str(request_type)
        self.handler, self.endpoint = handler, endpoint
        self.adapter: TypeAdapter[Any] = TypeAdapter(request_type)
        make_fail_fast(self.adapter)


def replace_invocations(
    app: FastAPI, tasks: tuple[SupportedTask, ...], model_config: ModelConfig
) -> None:
    """Puts this route in the place of vLLM's."""
    types = [
        *get_generate_invocation_types(tasks, model_config),
        *get_pooling_invocation_types(tasks, model_config),
    ]
    kinds = [_Kind(kind, handler, endpoint) for kind, (handler, endpoint) in types]

    async def invocations(raw_request: Request) -> Any:
        """Routes requests by the type of their body."""
        return await _answer(kinds, raw_request)

    routes = app.router.routes
    routes[:] = [route for route in routes if getattr(route, "path", None) != PATH]
    app.add_api_route(
        PATH,
        invocations,
        methods=["POST"],
        dependencies=[Depends(validate_json_request)],
        response_model=None,
        responses={status.value: {"model": ErrorResponse} for status in _ERRORS},
    )


async def _answer(kinds: Sequence[_Kind], raw_request: Request) -> Any:
    """The answer of the first type that the body fits."""
    try:
        body = await raw_request.json()
    except (json.JSONDecodeError, RecursionError) as exc:  # the latter: nested too deeply
        raise HTTPException(HTTPStatus.BAD_REQUEST, f"JSON decode error: {exc}") from exc
    served = [kind for kind in kinds if kind.handler(raw_request) is not None]
    for kind in served:
        try:
            request = kind.adapter.validate_python(body)
        except ValidationError:
            continue
        return await kind.endpoint(request, raw_request)
    return _no_type(served, raw_request)


def _no_type(served: Sequence[_Kind], raw_request: Request) -> Response:
    names = [kind.name for kind in served]
    message = f"Cannot find suitable handler for request. Expected one of: {names}"
    error = base(raw_request).create_error_response(message=message)
    return JSONResponse(error.model_dump(), error.error.code)


#: Schemas of pydantic-core that have the option `fail_fast`.
_LISTS = ("list", "tuple", "set", "frozenset")


def fail_fast_routes(app: FastAPI) -> None:
    """Changes the validators of this app's routes, not vLLM's request types."""
    for route in app.routes:
        adapter = getattr(getattr(route, "body_field", None), "_type_adapter", None)
        if adapter is not None:
            make_fail_fast(adapter)


def make_fail_fast(adapter: TypeAdapter[Any]) -> None:
    """Lets validation with this adapter stop at the first bad element of a list.

    By default pydantic collects every error of every element, for each alternative of its type:
    500 kB of `messages: [{}, {}, ...]` are 2.5 million errors, which block vLLM's event loop for
    17 s. The client only gets the first ones, so nothing is lost.
    """
    # Prebuilt validators of nested models would still collect all errors.
    adapter.validator = SchemaValidator(_changed(adapter.core_schema), _use_prebuilt=False)


def _changed(schema: Any) -> Any:
    if isinstance(schema, dict):
        changed = {key: _changed(value) for key, value in schema.items()}
        if schema.get("type") in _LISTS:
            changed["fail_fast"] = True
        return changed
    if isinstance(schema, list | tuple):
        return type(schema)(_changed(value) for value in schema)
    return schema
