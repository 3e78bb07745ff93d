"""Make tests-data/distil/relations.json: MiniLM's relations between tokens by their formula in PyTorch, in f64, with their gradients.

    python tools/golden/distil_relations.py [OUTPUT_FILE]

Queries, keys and values of a layer are drawn for a student and a teacher of other widths, for sequences of some lengths; a relation is
softmax(A B^T / sqrt(D)) in each of as many heads on both sides, and the loss the mean of KL(teacher || student) over heads and tokens,
summed over relations (Wang et al. 2020, eq. 1 to 4; Wang et al. 2021, eq. 5 to 7). Numbers are short, so that they are the same in f32.
"""

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

OUT = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[2] / "tests-data/distil/relations.json"
V1 = ["query-key", "value-value"]
V2 = ["query-query", "key-key", "value-value"]
PARTS = {"query": 0, "key": 1, "value": 2}
torch.manual_seed(11)
torch.set_default_dtype(torch.float64)


def draw(tokens, hidden):
    return (torch.randn(tokens, 3 * hidden) * 1.5 * 64).round() / 64


def scores(states, kind, heads):
    a, b = (states.chunk(3, -1)[PARTS[name]] for name in kind.split("-"))
    a, b = (x.reshape(x.shape[0], heads, -1).transpose(0, 1) for x in (a, b))
    return a @ b.transpose(1, 2) / a.shape[-1] ** 0.5


def case(kinds, heads, hidden, lengths):
    student, teacher = (draw(sum(lengths), width) for width in hidden)
    student.requires_grad_()
    loss = 0
    for kind in kinds:
        for own, said in zip(student.split(lengths), teacher.split(lengths)):
            own, said = (F.log_softmax(scores(x, kind, heads), -1) for x in (own, said))
            loss = loss + F.kl_div(own, said, reduction="sum", log_target=True)
    loss = loss / (heads * sum(lengths))
    loss.backward()
    return {
        "kinds": kinds,
        "heads": heads,
        "lengths": lengths,
        "student": student.flatten().tolist(),
        "teacher": teacher.flatten().tolist(),
        "loss": loss.item(),
        "gradient": [round(x, 12) for x in student.grad.flatten().tolist()],
    }


cases = [
    case(V2, 3, (6, 12), [5]),
    case(V1, 2, (8, 8), [7]),
    case(V2, 6, (6, 18), [3]),
    case(["query-key"], 1, (5, 3), [4]),
    case(V2, 4, (8, 12), [1, 6, 3]),
    case(V1, 3, (12, 9), [2, 1, 5]),
    case(["value-value"], 2, (16, 4), [9, 2]),
]
OUT.write_text(json.dumps(cases, separators=(",", ":")) + "\n")
