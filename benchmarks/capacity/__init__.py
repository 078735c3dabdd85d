"""A graph under load in simulated time, for `benchmarks.planner`: a heap of events.

The shipped policies decide: local or remote (`disagg/decision/rule.py`), which decode worker
(`routing/kv_routing.py`), how many workers (`policy/scaling/`). Engines, queue and network
are models of their times.
"""
