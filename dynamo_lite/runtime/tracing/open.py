"""Opens the tracer of a process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from dynamo_lite.runtime.tracing.tracer import Tracer, TracingOptions


@asynccontextmanager
async def open_tracer(
    options: TracingOptions, *, namespace: str, component: str, instance: str
) -> AsyncIterator[Tracer]:
    """Leaving the context sends the last spans, for a few seconds at most."""
    # Importing the SDK and its exporters takes a while, so only with tracing and in a thread.
    await asyncio.to_thread(__import__, "dynamo_lite.runtime.tracing.otlp")
    from dynamo_lite.runtime.tracing.otlp import OtlpTracer

    tracer = OtlpTracer(options, namespace=namespace, component=component, instance=instance)
    async with tracer:
        yield tracer
