"""Opens the tracer of a process that traces. Others never load OpenTelemetry."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from dynamo_lite.runtime.tracing.tracer import Tracer, TracingOptions


@asynccontextmanager
async def open_tracer(
    options: TracingOptions, *, namespace: str, component: str, instance: str
) -> AsyncIterator[Tracer]:
    """Leaving it sends what is left, for a few seconds at most."""
    # The SDK and its exporters are loaded by those who trace only, and take a while.
    await asyncio.to_thread(__import__, "dynamo_lite.runtime.tracing.otlp")
    from dynamo_lite.runtime.tracing.otlp import OtlpTracer

    tracer = OtlpTracer(options, namespace=namespace, component=component, instance=instance)
    async with tracer:
        yield tracer
