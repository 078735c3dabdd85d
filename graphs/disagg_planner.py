"""Conditional disaggregation with a planner that changes the numbers of workers with the load."""

from dynamo_lite.serve.services.services import FRONTEND, PLANNER, PREFILL_WORKER, VLLM_WORKER

# The planner is drained first, so that it starts no worker of a graph that ends.
Frontend = PLANNER.link(FRONTEND).link(VLLM_WORKER).link(PREFILL_WORKER)
