"""Conditional disaggregation: prefill workers compute long prompts."""

from dynamo_lite.serve.services.services import FRONTEND, PREFILL_WORKER, PROCESSOR, VLLM_WORKER

Frontend = FRONTEND.link(PROCESSOR).link(VLLM_WORKER).link(PREFILL_WORKER)
