"""LoRA adapters of the demo model with random weights, in PEFT's format
(https://huggingface.co/docs/peft/main/en/developer_guides/checkpoint)."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.vllm.graph import MODEL

RANK = 8


def write_adapter(folder: Path, seed: int) -> Path:
    """The same seed gives the same adapter. It changes the answers of the model. Returns its
    folder."""
    config = json.loads((MODEL / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    sizes = {
        "q_proj": heads * config["head_dim"],
        "v_proj": config["num_key_value_heads"] * config["head_dim"],
    }
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for module, size in sizes.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            shapes = {"lora_A": (RANK, hidden), "lora_B": (size, RANK)}
            for part, shape in shapes.items():
                tensors[f"{name}.{part}.weight"] = 0.1 * torch.randn(shape, generator=random)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    told = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": list(sizes)}
    (folder / "adapter_config.json").write_text(json.dumps({**told, "bias": "none"}))
    return folder
