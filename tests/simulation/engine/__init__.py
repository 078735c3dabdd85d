"""An engine that computes digests instead of tokens, over real blocks of real bytes.

It drives the same remote prefill halves as vLLM does, in the same order, and its
every token depends on every byte of the sequence's KV: a write that is missing
or foreign changes the answer.
"""
