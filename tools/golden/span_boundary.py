"""Makes tests-data/span-boundary: SpanBERT's two losses on a small BERT of `transformers`, in f64.

    python tools/golden/span_boundary.py tests-data/span-boundary

The head is written here as Joshi et al. (2020) and their code have it: the tokens before and behind a span and an embedding of the
place, concatenated, through two layers with GELU and LayerNorm, to the table of words with a bias of its own. Weights are not
stored: element i of the k-th parameter (henson's names sorted by bytes) is 0.2·sin(0.7·i + 1.3·k), plus 1 in the weights of norms.
henson keeps the first layer as two matrices, `linear1` for the two tokens and `linear1_position` for the place: here they are the
columns of one. The loss is MLM sum / masked tokens + SBO sum / (SBO targets + 1). The ten steps are AdamW, lr 1e-3, betas 0.9
0.999, eps 1e-6, weight decay 0.01 on matrices, gradients clipped to a norm of 1.
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import cross_entropy, gelu

VOCAB, HIDDEN, WIDTH, TARGETS = 40, 16, 200, 15
HEAD = "cls.pair_target_predictions."
LENGTHS = [14, 9, 24]
# Spans within sequences, first and last token; 0 and the last token are special. The first of sequence 0 begins the text and has no
# targets; the next two have a neighbour in common; the one of sequence 2 has two tokens more than there are targets.
SPANS = [[(1, 2), (5, 6), (8, 10)], [(3, 3)], [(3, 19)]]


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.places = nn.Embedding(TARGETS, WIDTH)
        self.first = nn.Linear(2 * HIDDEN + WIDTH, HIDDEN)
        self.first_norm = nn.LayerNorm(HIDDEN, eps=1e-12)
        self.second = nn.Linear(HIDDEN, HIDDEN)
        self.second_norm = nn.LayerNorm(HIDDEN, eps=1e-12)
        self.bias = nn.Parameter(torch.zeros(VOCAB))

    def forward(self, last, ends, places, table):
        x = torch.cat([last[ends[:, 0]], last[ends[:, 1]], self.places(places)], dim=1)
        x = self.first_norm(gelu(self.first(x)))
        x = self.second_norm(gelu(self.second(x)))
        return x @ table.T + self.bias


def own_names(model, head):
    """Each parameter of henson: its tensor here, and the columns of it that it is."""
    both = slice(None, 2 * HIDDEN)
    mlp = HEAD + "mlp_layer_norm."
    named = {name: (value, slice(None)) for name, value in model.named_parameters()}
    return named | {
        HEAD + "position_embeddings.weight": (head.places.weight, slice(None)),
        HEAD + "bias": (head.bias, slice(None)),
        mlp + "linear1.weight": (head.first.weight, both),
        mlp + "linear1_position.weight": (head.first.weight, slice(2 * HIDDEN, None)),
        mlp + "linear1.bias": (head.first.bias, slice(None)),
        mlp + "layer_norm1.weight": (head.first_norm.weight, slice(None)),
        mlp + "layer_norm1.bias": (head.first_norm.bias, slice(None)),
        mlp + "linear2.weight": (head.second.weight, slice(None)),
        mlp + "linear2.bias": (head.second.bias, slice(None)),
        mlp + "layer_norm2.weight": (head.second_norm.weight, slice(None)),
        mlp + "layer_norm2.bias": (head.second_norm.bias, slice(None)),
    }


def fill(names):
    with torch.no_grad():
        for k, name in enumerate(sorted(names)):
            tensor, columns = names[name]
            part = tensor[..., columns]
            i = torch.arange(part.numel(), dtype=torch.float64)
            values = 0.2 * torch.sin(0.7 * i + 1.3 * k)
            if "norm" in name.split(".")[-2].lower() and name.endswith("weight"):
                values += 1
            part.copy_(values.float().double().reshape(part.shape))


def inputs():
    ids, rows, targets, ends, places, boundary = [], [], [], [], [], []
    for number, (length, spans) in enumerate(zip(LENGTHS, SPANS)):
        begin = len(ids)
        words = [2, *((7 * i + 3 * number) % 34 + 5 for i in range(length - 2)), 3]
        for first, last in spans:
            inside = range(first, last + 1)
            rows += [begin + i for i in inside]
            targets += [words[i] for i in inside]
            if first > 1 and last < length - 2:
                for place, i in list(enumerate(inside))[:TARGETS]:
                    ends.append([begin + first - 1, begin + last + 1])
                    places.append(place)
                    boundary.append(words[i])
        for first, last in spans:
            words[first : last + 1] = [4] * (last + 1 - first)
        ids += words
    tensors = {"ids": ids, "rows": rows, "targets": targets, "ends": ends, "places": places, "boundary": boundary}
    return {name: torch.tensor(value) for name, value in tensors.items()}


def losses(model, head, data):
    hidden = []
    begin = 0
    for length in LENGTHS:  # one at a time: no padding
        hidden.append(model.bert(data["ids"][None, begin : begin + length]).last_hidden_state[0])
        begin += length
    last = torch.cat(hidden)
    logits = model.cls(last[data["rows"]])
    masked = cross_entropy(logits, data["targets"], reduction="sum") / len(data["rows"])
    table = model.bert.embeddings.word_embeddings.weight
    boundary_logits = head(last, data["ends"], data["places"], table)
    boundary = cross_entropy(boundary_logits, data["boundary"], reduction="sum") / (len(data["boundary"]) + 1)
    return masked, boundary, logits, boundary_logits


def main():
    torch.set_num_threads(1)
    config = transformers.BertConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=24,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model, head = transformers.BertForMaskedLM(config).double().eval(), Head().double()
    names = own_names(model, head)
    fill(names)
    data = inputs()
    masked, boundary, logits, boundary_logits = losses(model, head, data)
    (masked + boundary).backward()
    values = {
        "output.losses": torch.stack([masked, boundary]),
        "output.logits": logits,
        "output.boundary_logits": boundary_logits,
    }
    for name, (tensor, columns) in names.items():
        grad = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        values[f"grad.{name}"] = grad[..., columns]

    parameters = list(model.parameters()) + list(head.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.01},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.999), eps=1e-6)
    steps, norms = [], []
    for _ in range(10):
        masked, boundary, _, _ = losses(model, head, data)
        optimizer.zero_grad()
        (masked + boundary).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, 1.0))
        optimizer.step()
        steps.append(torch.stack([masked, boundary]))
    values |= {"steps.losses": torch.stack(steps), "steps.grad_norms": torch.stack(norms)}
    values = {name: value.detach().float().contiguous() for name, value in values.items()}
    values |= {f"input.{name}": value for name, value in data.items()}
    values["input.lengths"] = torch.tensor(LENGTHS)
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    about = {"torch": torch.__version__, "transformers": transformers.__version__}
    save_file(values, out / "golden.safetensors", metadata={"about": json.dumps(about)})
    config.architectures = ["BertForMaskedLM"]
    (out / "config.json").write_text(json.dumps(config.to_dict(), indent=2, sort_keys=True) + "\n")
    print(values["output.losses"], values["steps.losses"][-1], len(data["boundary"]))


if __name__ == "__main__":
    main()
