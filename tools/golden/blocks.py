"""Makes tests-data/blocks: a small ModernBERT and a small T5 of `transformers`, values and gradients.

    python tools/golden/blocks.py tests-data/blocks

Weights are not stored: element i of the k-th parameter (names sorted by bytes) is a·sin(0.7·i + 1.3·k), plus 1 in the weights of
norms; a is 0.2, and 0.06 in T5, whose scores are not scaled: at 0.2 they reach 175, where f32 has no digits left for the softmax's
gradient. The loss is Σ y·sin(0.3·j + 1) over all elements j of the outputs, one sequence after the other.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import ModernBertConfig, ModernBertModel, T5Config, T5Model

ENCODER = [21, 6]
DECODER = [5, 13]


def fill(model, size):
    names = sorted(name for name, _ in model.named_parameters())
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for k, name in enumerate(names):
            x = parameters[name]
            i = torch.arange(x.numel(), dtype=torch.float64)
            values = size * torch.sin(0.7 * i + 1.3 * k)
            if "norm" in name and name.endswith("weight"):
                values += 1
            x.copy_(values.to(torch.float32).to(x.dtype).reshape(x.shape))


def ids(length, factor):
    return torch.tensor([[(factor * i + 3) % 36 + 4 for i in range(length)]])


def golden(model, outputs):
    """`outputs` are one tensor a sequence; in f64, rounded to f32 at the end."""
    flat = torch.cat([y.reshape(-1) for y in outputs])
    weights = torch.sin(0.3 * torch.arange(flat.numel(), dtype=torch.float64) + 1)
    (flat * weights).sum().backward()
    result = {f"output.{i}": y.detach().to(torch.float32) for i, y in enumerate(outputs)}
    for name, x in model.named_parameters():
        result[f"gradient.{name}"] = x.grad.to(torch.float32)
    return {name: x.contiguous().clone() for name, x in result.items()}


def main(directory):
    directory.mkdir(parents=True, exist_ok=True)
    config = ModernBertConfig(
        vocab_size=40, hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        local_attention=8, pad_token_id=0, attn_implementation="eager",
    )
    assert config.layer_types == ["full_attention", "sliding_attention"], config.layer_types
    model = ModernBertModel(config).double().eval()
    fill(model, 0.2)
    outputs = [model(input_ids=ids(n, 7)).last_hidden_state[0] for n in ENCODER]
    save_file(golden(model, outputs), directory / "modernbert.safetensors")

    config = T5Config(
        vocab_size=40, d_model=32, d_kv=16, d_ff=24, num_layers=2, num_decoder_layers=2, num_heads=3,
        relative_attention_num_buckets=8, relative_attention_max_distance=20, feed_forward_proj="gated-gelu",
    )
    model = T5Model(config).double().eval()
    fill(model, 0.06)
    outputs = [
        model(input_ids=ids(n, 7), decoder_input_ids=ids(m, 5)).last_hidden_state[0] for n, m in zip(ENCODER, DECODER)
    ]
    save_file(golden(model, outputs), directory / "t5.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
