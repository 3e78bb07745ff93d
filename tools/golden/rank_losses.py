"""Make tests-data/rank-losses/golden.json: losses of sentence-transformers' cross-encoders on fixed logits, with their gradients.

    HF_HUB_OFFLINE=1 python tools/golden/rank_losses.py [OUTPUT_FILE]

`lists` are the relevances of each query's documents, `logits` one for each document, list after list.
"""

import json
import sys
from pathlib import Path

import torch
from sentence_transformers.cross_encoder import CrossEncoder, losses

OUT = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[2] / "tests-data/rank-losses/golden.json"


class Model(CrossEncoder):
    """A model whose logits are given, document by document."""

    num_labels = 1
    device = torch.device("cpu")

    def __init__(self, logits):
        torch.nn.Module.__init__(self)
        self.logits = logits

    def preprocess(self, pairs, **_):
        return {"index": torch.tensor([int(document) for _, document in pairs])}

    def forward(self, features, **_):
        return {"scores": self.logits[features["index"]].unsqueeze(-1)}


def case(name, lists):
    count = sum(len(labels) for labels in lists)
    logits = (2.0 * torch.sin(1.9 * torch.arange(count, dtype=torch.float32) + 0.3)).requires_grad_()
    model = Model(logits)
    documents, start = [], 0
    for labels in lists:
        documents.append([str(start + i) for i in range(len(labels))])
        start += len(labels)
    queries = ["q"] * len(lists)
    if name in ("bce", "mse"):
        loss = (losses.BinaryCrossEntropyLoss if name == "bce" else losses.MSELoss)(model)
        flat = [label for labels in lists for label in labels]
        value = loss([["q"] * count, [str(i) for i in range(count)]], torch.tensor(flat))
    elif name == "margin-mse":
        # There, the columns are the positive and the negatives; here, the most relevant document of a list and the others.
        best = [max(range(len(labels)), key=lambda i: labels[i]) for labels in lists]
        order = [[b] + [i for i in range(len(labels)) if i != b] for b, labels in zip(best, lists)]
        columns = [[documents[q][o[k]] for q, o in enumerate(order)] for k in range(len(lists[0]))]
        value = losses.MarginMSELoss(model)([queries, *columns], torch.tensor([[labels[i] for i in o] for o, labels in zip(order, lists)]))
    else:
        make = {
            "ranknet": losses.RankNetLoss,
            "listnet": losses.ListNetLoss,
            "lambda": losses.LambdaLoss,
            "listmle": lambda model: losses.ListMLELoss(model, respect_input_order=False),
            "plistmle": lambda model: losses.PListMLELoss(model, respect_input_order=False),
        }[name]
        value = make(model)([queries, documents], [torch.tensor(labels) for labels in lists])
    value.backward()
    return {"name": name, "lists": lists, "logits": logits.tolist(), "loss": value.item(), "gradient": logits.grad.tolist()}


LISTS = [
    [[1.0, 0.0, 0.0]],
    [[1.0, 0.0], [0.0, 1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0]],
    [[3.0, 1.0, 0.0, 2.0], [0.5, 0.5, 0.0]],
]
OUT.parent.mkdir(parents=True, exist_ok=True)
EQUAL = [[[4.5, 1.0, 2.0]], [[0.5, 3.0], [2.0, -1.0], [0.0, 1.5]]]
names = ["bce", "mse", "ranknet", "listnet", "lambda", "listmle", "plistmle"]
cases = [case(name, lists) for name in names for lists in LISTS if name != "bce" or max(map(max, lists)) <= 1.0]
cases += [case(name, lists) for name in ["lambda", "listmle", "plistmle", "margin-mse"] for lists in EQUAL]
OUT.write_text("[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n")
