"""Makes the validation of request bodies stop at the first bad element of a list.

By default pydantic collects every error of every element, for each alternative of its type:
500 kB of `messages: [{}, {}, ...]` are 2.5 million errors, which block vLLM's event loop for
17 s. The client only gets the first ones, so nothing is lost.

Only the validators of one FastAPI app are changed, not vLLM's request types. So
`/invocations`, which validates by itself, still collects all errors.
"""

from typing import Any

from fastapi import FastAPI
from pydantic_core import SchemaValidator

#: Schemas of pydantic-core that have the option `fail_fast`.
_LISTS = ("list", "tuple", "set", "frozenset")


def fail_fast_routes(app: FastAPI) -> int:
    """Replaces the validators of the bodies of the app's routes; returns how many."""
    changed = 0
    for route in app.routes:
        adapter = getattr(getattr(route, "body_field", None), "_type_adapter", None)
        if adapter is not None:
            adapter.validator = _validator(adapter.core_schema)
            changed += 1
    return changed


def _validator(schema: Any) -> SchemaValidator:
    # Prebuilt validators of nested models would still collect all errors.
    return SchemaValidator(_fail_fast(schema), _use_prebuilt=False)


def _fail_fast(schema: Any) -> Any:
    if isinstance(schema, dict):
        changed = {key: _fail_fast(value) for key, value in schema.items()}
        if schema.get("type") in _LISTS:
            changed["fail_fast"] = True
        return changed
    if isinstance(schema, list | tuple):
        return type(schema)(_fail_fast(value) for value in schema)
    return schema
