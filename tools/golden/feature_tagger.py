"""Make tests-data/feature-tagger/golden.json: a small feature-based tagger (mixed layers, a BiLSTM of two layers, a matrix) in
PyTorch, with its output, loss and gradients, and the losses of five updates.

    python tools/golden/feature_tagger.py [OUTPUT_DIR]

Parameters are one flat list in henson's order; their names and shapes are those of torch.nn.LSTM and torch.nn.Linear. AdamW has
lr 1e-2, decay 0.01 on matrices alone and torch's other defaults; gradients are clipped to a norm of 0.1.
"""

import json
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
OUT = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "tests-data/feature-tagger"
LAYERS, WIDTH, HIDDEN, LABELS, LENGTHS = 3, 5, 4, 6, [3, 1, 6, 2]


class Tagger(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = torch.nn.Parameter(torch.randn(LAYERS))
        self.gamma = torch.nn.Parameter(torch.tensor([1.3]))
        self.lstm = torch.nn.LSTM(WIDTH, HIDDEN, num_layers=2, bidirectional=True, batch_first=True)
        self.classifier = torch.nn.Linear(2 * HIDDEN, LABELS)

    def forward(self, vectors):
        logits = []
        for sentence in torch.split(vectors, LENGTHS):
            layers = sentence.view(-1, LAYERS, WIDTH)
            mixed = self.gamma * (self.mix.softmax(0)[None, :, None] * layers).sum(1)
            logits.append(self.classifier(self.lstm(mixed[None])[0][0]))
        return torch.cat(logits)


def flat(tensors):
    return [float(f"{float(x):.9g}") for tensor in tensors for x in tensor.detach().flatten()]


torch.manual_seed(3)
tagger = Tagger()
vectors = torch.randn(sum(LENGTHS), LAYERS * WIDTH)
tags = torch.randint(0, LABELS, (sum(LENGTHS),))
golden = {
    "about": {"torch": torch.__version__},
    "layers": LAYERS, "width": WIDTH, "hidden": HIDDEN, "labels": LABELS, "lengths": LENGTHS,
    "vectors": flat([vectors]), "tags": tags.tolist(), "parameters": flat(tagger.parameters()),
}
matrices = [p for p in tagger.parameters() if p.dim() > 1]
others = [p for p in tagger.parameters() if p.dim() == 1]
optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}], lr=1e-2)
losses = []
for step in range(5):
    optimizer.zero_grad()
    logits = tagger(vectors)
    loss = torch.nn.functional.cross_entropy(logits, tags)
    loss.backward()
    if step == 0:
        golden["logits"] = flat([logits])
        golden["gradients"] = flat(p.grad for p in tagger.parameters())
    torch.nn.utils.clip_grad_norm_(tagger.parameters(), 0.1)
    optimizer.step()
    losses.append(loss.item())
golden["losses"] = losses
golden["parameters_after"] = flat(tagger.parameters())
OUT.mkdir(parents=True, exist_ok=True)
(OUT / "golden.json").write_text(json.dumps(golden) + "\n")
print(losses)
