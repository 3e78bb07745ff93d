"""Make tests-data/nano-gpt: a GPT of three layers that was trained to sort, with its intermediate tensors.

    python tools/golden/nano_gpt.py FOLDER [OUTPUT_DIR]

FOLDER holds gpt-nano-sort-model.json and gpt-nano-sort-t0-partials.json from `public/` of github.com/bbycroft/llm-viz (MIT,
Copyright 2023 Brendan Bycroft). The model becomes a directory of a GPT-2 as older files are: Conv1D weights, masks among them.
Of the partials, q, k and v are left out: they are columns of qkv.
"""

import base64
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file


def tensors(path):
    read = json.loads(path.read_text())
    config = read.pop("config")
    decode = lambda t: torch.frombuffer(bytearray(base64.b64decode(t["data"])), dtype=torch.float32).reshape(t["shape"])
    return config, {name: decode(tensor) for name, tensor in read.items()}


def main():
    source = Path(sys.argv[1])
    default = Path(__file__).resolve().parents[2] / "tests-data" / "nano-gpt"
    directory = Path(sys.argv[2]) if len(sys.argv) > 2 else default
    directory.mkdir(parents=True, exist_ok=True)
    config, weights = tensors(source / "gpt-nano-sort-model.json")
    conv1d = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    weights = {name: value.T.contiguous() if name.endswith(conv1d) else value for name, value in weights.items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    settings = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config["vocab_size"],
        "n_positions": config["block_size"],
        "n_ctx": config["block_size"],
        "n_embd": config["n_embd"],
        "n_layer": config["n_layer"],
        "n_head": config["n_head"],
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    (directory / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    _, partials = tensors(source / "gpt-nano-sort-t0-partials.json")
    left_out = ("q", "k", "v")
    partials = {name: value for name, value in partials.items() if name not in left_out}
    save_file(partials, directory / "partials.safetensors")


if __name__ == "__main__":
    main()
