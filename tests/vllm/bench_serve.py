"""vLLM's load generator, `vllm bench serve`."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

#: The program `vllm` looks for package data that the CPU build does not have.
_PROGRAM = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


def bench_serve(url: str, tokenizer: Path, folder: Path) -> dict[str, Any]:
    """Asks 12 chats of 16 tokens, four at a time. Returns what it has written into `folder`."""
    options = {
        "backend": "openai-chat",
        "endpoint": "/v1/chat/completions",
        "base-url": url,
        "model": "tiny",
        "tokenizer": tokenizer,
        "dataset-name": "random",
        "random-input-len": 64,
        "random-output-len": 16,
        "num-prompts": 12,
        "max-concurrency": 4,
        "result-dir": folder,
        "result-filename": "result.json",
    }
    flags = ["--ignore-eos", "--disable-tqdm", "--save-result"]
    arguments = [*flags, *(f"--{key}={value}" for key, value in options.items())]
    subprocess.run([sys.executable, "-c", _PROGRAM, *arguments], check=True, timeout=300)
    return json.loads((folder / "result.json").read_bytes())


def assert_every_token_came(result: dict[str, Any]) -> None:
    assert [result[key] for key in ("completed", "failed", "total_output_tokens")] == [12, 0, 192]
