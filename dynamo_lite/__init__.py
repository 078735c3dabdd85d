"""dynamo_lite: queue-driven conditional disaggregation for LLM serving on stock vLLM."""

__version__ = "0.3.0"
