"""Makes the tiny demo model: a Llama with random weights and a byte-level tokenizer.

    .venv/bin/python scripts/tiny_model.py DIRECTORY [SHAPE]

SHAPE: tiny (0.7 million parameters, default), or bench (119 million, for benchmarks).
For tests there are also

    mla          DeepSeek V2: multi-head latent attention, no experts
    sliding      Mistral: a sliding window of 128 tokens in all layers
    windows      Gemma 3: five layers with a sliding window of 128 tokens, and one without
    experts      Qwen3-MoE: four experts, of which a token uses two
    hybrid       Qwen3-Next: three layers with linear attention, and one with full attention
    eagle        a draft for `tiny`: EAGLE, one layer
    images       Idefics 3: `tiny` behind an image encoder; an image is up to 130 tokens

The same seed gives the same weights. The model's text is noise; otherwise it is a real
model with chat template, bfloat16 weights and grouped-query attention. Nothing is
downloaded. A directory that already has the model is not changed.
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

#: Arguments of the architecture's configuration class (LlamaConfig, or see ARCHITECTURES).
#: vLLM's CPU attention needs head sizes of at least 32, and for MLA the sizes of a full
#: DeepSeek.
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
    "mla": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 3,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
    },
    "sliding": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "sliding_window": 128,
    },
    "windows": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "sliding_window": 128,
        "layer_types": [*["sliding_attention"] * 5, "full_attention"],
    },
    "experts": {
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
    },
    "hybrid": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "full_attention_interval": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    },
}
SHAPES["images"] = {
    "text": SHAPES["tiny"],
    "vision": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 112,
        "patch_size": 14,
    },
}
SHAPES["eagle"] = {**SHAPES["tiny"], "num_hidden_layers": 1}
#: transformers' name of the architecture; Llama for all others.
ARCHITECTURES = {
    "mla": "DeepseekV2",
    "sliding": "Mistral",
    "windows": "Gemma3",
    "experts": "Qwen3Moe",
    "hybrid": "Qwen3Next",
}

IMAGE_TOKENS = ["<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"]

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
    from transformers import PreTrainedTokenizerFast

    transformers.utils.logging.disable_progress_bar()
    pieces = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    merges = _merges(vocabulary, VOCABULARY)
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
    text = {
        "vocab_size": VOCABULARY,
        "max_position_embeddings": CONTEXT_TOKENS,
        "bos_token_id": vocabulary["<s>"],
        "eos_token_id": vocabulary["<|im_end|>"],
        "pad_token_id": vocabulary["<pad>"],
        "tie_word_embeddings": False,
        # Wider than usual: otherwise the logits of random weights are so close together
        # that rounding decides which token wins.
        "initializer_range": 0.2,
    }
    if shape == "images":
        _write_with_images(directory, text, tokenizer)
        return
    architecture = ARCHITECTURES.get(shape, "Llama")
    model_class = getattr(transformers, f"{architecture}ForCausalLM")
    torch.manual_seed(SEED)
    model = model_class(model_class.config_class(**text, **SHAPES[shape])).bfloat16()
    model.save_pretrained(directory)
    if shape == "eagle":
        _write_draft(model, directory)
    tokenizer.save_pretrained(directory)


def _write_with_images(directory: Path, text: dict[str, Any], tokenizer: Any) -> None:
    """The images' tokens are the first ones after the vocabulary."""
    import torch
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, LlamaConfig

    tokenizer.add_special_tokens({"additional_special_tokens": IMAGE_TOKENS})
    tokenizer.chat_template = CHAT_TEMPLATE.replace(
        "for part in message.content if part.type == 'text' %}{{ part.text }}",
        "for part in message.content %}{{ part.text if part.type == 'text' else '<image>' }}",
    )
    shape = SHAPES["images"]
    vision, scale = shape["vision"], 2
    size, patch = vision["image_size"], vision["patch_size"]
    torch.manual_seed(SEED)
    config = Idefics3Config(
        vision_config={**vision, "initializer_range": 0.2},
        text_config=LlamaConfig(**{**text, "vocab_size": VOCABULARY + 8}, **shape["text"]),
        scale_factor=scale,
        image_token_id=VOCABULARY + IMAGE_TOKENS.index("<image>"),
        pad_token_id=text["pad_token_id"],
    )
    Idefics3ForConditionalGeneration(config).bfloat16().save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    processor = {
        "processor_class": "Idefics3Processor",
        "image_seq_len": (size // patch // scale) ** 2,
    }
    images = {
        "processor_class": "Idefics3Processor",
        "image_processor_type": "Idefics3ImageProcessor",
        "do_image_splitting": True,
        "size": {"longest_edge": 2 * size},
        "max_image_size": {"longest_edge": size},
    }
    for name, content in (("processor_config", processor), ("preprocessor_config", images)):
        (directory / f"{name}.json").write_text(json.dumps(content, indent=2))


def _write_draft(model: Any, directory: Path) -> None:
    """The layers, and what joins the target's hidden state with the next token's embedding. The
    embedding and the head are the target's (https://github.com/SafeAILab/EAGLE)."""
    import torch
    from safetensors.torch import save_file

    width = model.config.hidden_size
    layers = {
        name.removeprefix("model."): weight
        for name, weight in model.state_dict().items()
        if name.startswith("model.layers.") and "input_layernorm" not in name
    }
    joining = torch.randn(width, 2 * width, dtype=torch.bfloat16) * model.config.initializer_range
    save_file({**layers, "fc.weight": joining}, directory / "model.safetensors")


def _merges(vocabulary: dict[str, int], size: int) -> list[tuple[str, str]]:
    """Fills the vocabulary up to `size` with pairs of letters."""
    letters = "etaoinshrdlucmfwypvbgk"
    merges: list[tuple[str, str]] = []
    for left in ("Ġ", *letters):
        for right in letters:
            if len(vocabulary) == size:
                return merges
            merges.append((left, right))
            vocabulary[left + right] = len(vocabulary)
    return merges


def recipe_of(shape: str) -> dict[str, Any]:
    """Content of recipe.json, which identifies the model in a directory."""
    if shape == "tiny":
        return RECIPE
    named = {"name": shape} if shape in ARCHITECTURES or shape in ("eagle", "images") else {}
    return {**RECIPE, "shape": SHAPES[shape], **named}


def main() -> None:
    shape = "tiny" if len(sys.argv) < 3 else sys.argv[2]
    if not 2 <= len(sys.argv) <= 3 or shape not in SHAPES:
        sys.exit(__doc__)
    target = Path(sys.argv[1])
    recipe = target / "recipe.json"
    made_by = recipe_of(shape)
    if recipe.is_file() and json.loads(recipe.read_text()) == made_by:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    # Renamed when complete: an interrupted run leaves no incomplete model.
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
