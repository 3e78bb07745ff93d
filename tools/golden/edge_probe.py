"""Make tests-data/edge-probe/golden.json: small edge probes (Tenney et al. 2019) of one and of two spans in PyTorch, with their
logits, loss and gradients, and the losses of five updates.

    python tools/golden/edge_probe.py [OUTPUT_DIR]

Layers are mixed, projected, pooled over each span by a softmax over one score for each token, and classified by a perceptron
(tanh, LayerNorm). The loss is the mean binary cross-entropy of all logits. Parameters are one flat list in henson's order. The
score's bias is left out of that list: it has no effect, which the script checks. Adam has lr 1e-2 and torch's other defaults;
gradients are clipped to a norm of 0.1.
"""

import json
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
OUT = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "tests-data/edge-probe"
LAYERS, WIDTH, PROJECTION, HIDDEN, LABELS = 3, 5, 4, 6, 7
# Tokens of each text, and its targets: spans of token rows within the text.
TEXTS = [
    (6, [((0, 1), (2, 6)), ((1, 4), (0, 1)), ((5, 6), (5, 6))]),
    (1, [((0, 1), (0, 1))]),
    (9, [((0, 9), (3, 5)), ((8, 9), (0, 8))]),
]


class Probe(torch.nn.Module):
    def __init__(self, spans):
        super().__init__()
        self.mix = torch.nn.Parameter(torch.randn(LAYERS))
        self.gamma = torch.nn.Parameter(torch.tensor([1.3]))
        self.pools = torch.nn.ModuleList(
            torch.nn.ModuleList([torch.nn.Linear(WIDTH, PROJECTION), torch.nn.Linear(PROJECTION, 1)]) for _ in range(spans)
        )
        self.hidden = torch.nn.Linear(spans * PROJECTION, HIDDEN)
        self.norm = torch.nn.LayerNorm(HIDDEN)
        torch.nn.init.normal_(self.norm.weight, 1.0, 0.3)
        torch.nn.init.normal_(self.norm.bias, 0.0, 0.3)
        self.output = torch.nn.Linear(HIDDEN, LABELS)

    def named(self):
        """All parameters but the scores' biases."""
        return [p for name, p in self.named_parameters() if not (name.startswith("pools") and name.endswith("1.bias"))]

    def forward(self, vectors):
        layers = vectors.view(-1, LAYERS, WIDTH)
        mixed = self.gamma * (self.mix.softmax(0)[None, :, None] * layers).sum(1)
        rows, start = [], 0
        for tokens, targets in TEXTS:
            for spans in targets:
                parts = []
                for (project, score), (first, end) in zip(self.pools, spans):
                    x = project(mixed[start + first : start + end])
                    parts.append((score(x).softmax(0) * x).sum(0))
                rows.append(torch.cat(parts))
            start += tokens
        return self.output(self.norm(torch.tanh(self.hidden(torch.stack(rows)))))


def flat(tensors):
    return [float(f"{float(x):.9g}") for tensor in tensors for x in tensor.detach().flatten()]


def probe(spans):
    model = Probe(spans)
    vectors = torch.randn(sum(tokens for tokens, _ in TEXTS), LAYERS * WIDTH)
    targets = (torch.rand(sum(len(targets) for _, targets in TEXTS), LABELS) < 0.3).float()
    case = {"spans": spans, "vectors": flat([vectors]), "targets": flat([targets]), "parameters": flat(model.named())}
    optimizer = torch.optim.Adam(model.named(), lr=1e-2)
    losses = []
    for step in range(5):
        model.zero_grad()
        logits = model(vectors)
        loss = torch.nn.functional.binary_cross_entropy(torch.sigmoid(logits), targets)
        loss.backward()
        if step == 0:
            case["logits"] = flat([logits])
            case["gradients"] = flat(p.grad for p in model.named())
            assert all(float(score.bias.grad.abs()) < 1e-7 for _, score in model.pools)
        torch.nn.utils.clip_grad_norm_(model.named(), 0.1)
        optimizer.step()
        losses.append(loss.item())
    case["losses"] = losses
    case["parameters_after"] = flat(model.named())
    print(losses)
    return case


torch.manual_seed(5)
golden = {
    "about": {"torch": torch.__version__},
    "layers": LAYERS, "width": WIDTH, "projection": PROJECTION, "hidden": HIDDEN, "labels": LABELS,
    "texts": [[tokens, targets] for tokens, targets in TEXTS],
    "cases": [probe(1), probe(2)],
}
OUT.mkdir(parents=True, exist_ok=True)
(OUT / "golden.json").write_text(json.dumps(golden) + "\n")
