"""Print the losses that transformers gives for the targets of tests-data/writers, without and with label smoothing: the values in
crates/train/src/pretraining.rs.

    pip install torch transformers && python tools/golden/writers_loss.py
"""

import json
import pathlib

import torch
from transformers import AutoModelForSeq2SeqLM

WRITERS = pathlib.Path(__file__).parents[2] / "tests-data" / "writers"


def padded(rows, filler):
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=filler)


for name in ("t5", "t5-v1_1", "bart"):
    golden = json.loads((WRITERS / name / "golden.json").read_text())
    model = AutoModelForSeq2SeqLM.from_pretrained(WRITERS / name).eval()
    ids, labels = padded(golden["inputs"], model.config.pad_token_id), padded(golden["targets"], -100)
    mask = padded([[1] * len(row) for row in golden["inputs"]], 0)
    with torch.no_grad():
        output = model(input_ids=ids, attention_mask=mask, labels=labels)
    smoothed = torch.nn.functional.cross_entropy(
        output.logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1, ignore_index=-100
    )
    print(name, output.loss.item(), smoothed.item())
