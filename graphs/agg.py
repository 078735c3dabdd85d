"""Aggregated serving: every worker prefills and decodes."""

from dynamo_lite.serve.services.services import FRONTEND, VLLM_WORKER

Frontend = FRONTEND.link(VLLM_WORKER.with_defaults(remote_prefill=False))
