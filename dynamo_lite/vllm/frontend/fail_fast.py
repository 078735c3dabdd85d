"""Lets the validation of a request's body end at the first bad element of a list."""

from typing import Any

from fastapi import FastAPI
from pydantic_core import SchemaValidator

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


def _changed(schema: Any) -> Any:
    if isinstance(schema, dict):
        changed = {key: _changed(value) for key, value in schema.items()}
        if schema.get("type") in _LISTS:
            changed["fail_fast"] = True
        return changed
    if isinstance(schema, list | tuple):
        return type(schema)(_changed(value) for value in schema)
    return schema
