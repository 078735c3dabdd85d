"""Conditional disaggregation: prefill workers compute long prompts."""

from dynamo_lite.serve.services.services import FRONTEND, PREFILL_WORKER, VLLM_WORKER

Frontend = FRONTEND.link(VLLM_WORKER).link(PREFILL_WORKER)
