"""Makes the tiny demo model: a Llama with random weights and a byte-level tokenizer.

    .venv/bin/python scripts/tiny_model.py DIRECTORY [SHAPE]

SHAPE: tiny (0.7 million parameters, default), or bench (119 million, for benchmarks).

Same seed, same weights. Its text is noise; everything else about it is a real
model: chat template, bfloat16 weights, grouped-query attention. Nothing is
fetched. A directory that holds the model already is left alone.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

SEED = 20250607
SPECIAL_TOKENS = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
VOCABULARY = 512
CONTEXT_TOKENS = 8192
RECIPE = {"recipe": 1, "seed": SEED, "vocabulary": VOCABULARY, "context": CONTEXT_TOKENS}

#: Arguments of LlamaConfig. vLLM's CPU attention takes head sizes from 32 on.
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
    },
    "bench": {
        "hidden_size": 768,
        "intermediate_size": 3584,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
}

CHAT_TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\n' }}
{%- if message.content is string %}{{ message.content }}
{%- elif message.content %}
{%- for part in message.content if part.type == 'text' %}{{ part.text }}{% endfor -%}
{%- endif -%}
{%- if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif -%}
{{ '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}
"""


def make(directory: Path, shape: str) -> None:
    """Writes tokenizer, configuration and weights into `directory`."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    transformers.utils.logging.disable_progress_bar()
    pieces = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    merges = _merges(vocabulary)
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="<|im_end|>",
        pad_token="<pad>",
        additional_special_tokens=SPECIAL_TOKENS[2:4],
        model_max_length=CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            **SHAPES[shape],
            max_position_embeddings=CONTEXT_TOKENS,
            bos_token_id=vocabulary["<s>"],
            eos_token_id=vocabulary["<|im_end|>"],
            pad_token_id=vocabulary["<pad>"],
            tie_word_embeddings=False,
            # Wider than usual: the logits of random weights lie so close together that
            # rounding would otherwise decide which token wins.
            initializer_range=0.2,
        )
    ).bfloat16()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _merges(vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Fills the vocabulary up to its size with pairs of letters."""
    letters = "etaoinshrdlucmfwypvbgk"
    merges: list[tuple[str, str]] = []
    for left in ("Ġ", *letters):
        for right in letters:
            if len(vocabulary) == VOCABULARY:
                return merges
            merges.append((left, right))
            vocabulary[left + right] = len(vocabulary)
    return merges


def main() -> None:
    shape = "tiny" if len(sys.argv) < 3 else sys.argv[2]
    if not 2 <= len(sys.argv) <= 3 or shape not in SHAPES:
        sys.exit(__doc__)
    target = Path(sys.argv[1])
    recipe = target / "recipe.json"
    made_by = RECIPE if shape == "tiny" else {**RECIPE, "shape": SHAPES[shape]}
    if recipe.is_file() and json.loads(recipe.read_text()) == made_by:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    # Moved into place only when whole: an interrupted run leaves no half a model.
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        draft = Path(scratch) / target.name
        draft.mkdir()
        make(draft, shape)
        (draft / recipe.name).write_text(json.dumps(made_by))
        shutil.rmtree(target, ignore_errors=True)
        draft.rename(target)
    print(f"made {target}")


if __name__ == "__main__":
    main()
