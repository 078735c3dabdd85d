"""Checks the grammars of requests from vLLM's Rust frontend, and sets the backend of each.

`vllm-rs` checks no grammar and asks for the backend `guidance` always. An engine keeps the
backend of its first grammar, and `guidance` accepts what it cannot compile: such an answer is
empty. vLLM's Python frontend checks a grammar before an engine has it; this is the same check.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.exceptions import VLLMError, VLLMValidationError
from vllm.tokenizers import cached_tokenizer_from_config


class GrammarCheck:
    """A context manager. One thread checks the grammars in turn: some take seconds to parse, and
    the event loop serves all streams. It loads the tokeniser with the first grammar."""

    def __init__(self, config: VllmConfig):
        self._config = config
        self._tokenizer: Any = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def check(self, params: SamplingParams) -> None:
        """Sets the backend of the request's grammar. A cancelled check that waits for the thread is
        not done. Raises VLLMValidationError for a grammar that no backend takes."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._check, params)

    def _check(self, params: SamplingParams) -> None:
        assert params.structured_outputs is not None
        if self._tokenizer is None:
            self._tokenizer = cached_tokenizer_from_config(self._config.model_config)
        params.structured_outputs._backend = None
        params.structured_outputs._backend_was_auto = False
        try:
            params.verify(
                self._config.model_config,
                None,
                self._config.structured_outputs_config,
                self._tokenizer,
            )
        except VLLMError:
            raise
        # A panic of a grammar library in Rust is no Exception. Nothing cancels this thread.
        except BaseException as exc:
            raise VLLMValidationError(f"{type(exc).__name__}: {exc}") from exc
