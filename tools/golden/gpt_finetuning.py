"""Make tests-data/gpt-finetuning: small decoders with heads, and the losses of GPT's fine-tuning (Radford et al. 2018) on them.

    HF_HUB_OFFLINE=1 python tools/golden/gpt_finetuning.py [OUTPUT_DIR]

The texts are those of tests-data/finetune with the vocabulary of tests-data/likelihood, behind which stand the start, delimiter and
extract tokens. Every sequence runs alone, so nothing is padded. The loss is that of the task plus 0.5 times the language model's, a
mean over the tokens of each sequence and then over all sequences; pairs with numbers are read in both orders, their last states added.
golden.json has for each case the loss before each of five updates (AdamW, lr 1e-3 falling in a line to 0, eps 1e-6, no decay, clip
1.0).
"""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch.nn.functional import cross_entropy

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests-data"
OUT = Path(sys.argv[1]) if len(sys.argv) > 1 else DATA / "gpt-finetuning"
STEPS, LR = 5, 1e-3

tokenizer = transformers.BertTokenizer(vocab=str(DATA / "likelihood/vocab.txt"), do_lower_case=True)
KNOWN = tokenizer.vocab_size
START, DELIMITER, EXTRACT = KNOWN, KNOWN + 1, KNOWN + 2
SIZES = {"vocab_size": KNOWN + 3, "n_positions": 80, "n_embd": 8, "n_layer": 2, "n_head": 2}
DROPOUTS = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "summary_first_dropout": 0.0}
MODELS = {
    "sequence": (transformers.GPT2ForSequenceClassification, transformers.GPT2Config(**SIZES, **DROPOUTS, num_labels=3)),
    "regression": (transformers.OpenAIGPTForSequenceClassification, transformers.OpenAIGPTConfig(**SIZES, **DROPOUTS, num_labels=1)),
    "choice": (transformers.GPT2DoubleHeadsModel, transformers.GPT2Config(**SIZES, **DROPOUTS, num_labels=1)),
}


def rows(name):
    return [json.loads(line) for line in (DATA / "finetune" / name).read_text().splitlines()]


def ids(*texts):
    parts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    whole = [START, *parts[0]]
    for part in parts[1:]:
        whole += [DELIMITER, *part]
    return torch.tensor(whole + [EXTRACT])


def states(model, sequence):
    return model.transformer(sequence[None]).last_hidden_state[0]


def language(model, sequence, h):
    table = model.transformer.wte if hasattr(model.transformer, "wte") else model.transformer.tokens_embed
    return cross_entropy(h[:-1] @ table.weight.T, sequence[1:])


def classify(model):
    data = rows("classify.jsonl")
    labels = sorted({row["label"] for row in data})
    task, lm = [], []
    for row in data:
        sequence = ids(row["text"])
        h = states(model, sequence)
        task.append(cross_entropy(model.score(h[-1]), torch.tensor(labels.index(row["label"]))))
        lm.append(language(model, sequence, h))
    return torch.stack(task).mean(), torch.stack(lm).mean()


def regress(model):
    task, lm = [], []
    for row in rows("regress.jsonl"):
        first, second = row["sentence1"], row["sentence2"]
        both = [ids(first, second), ids(second, first)]
        h = [states(model, sequence) for sequence in both]
        task.append((model.score(h[0][-1] + h[1][-1])[0] - row["score"]) ** 2)
        lm += [language(model, sequence, own) for sequence, own in zip(both, h)]
    return torch.stack(task).mean(), torch.stack(lm).mean()


def choose(model):
    task, lm = [], []
    for row in rows("choice.jsonl"):
        scores = []
        for ending in row["choices"]:
            sequence = ids(row["context"], ending)
            h = states(model, sequence)
            scores.append(model.multiple_choice_head.summary(h[-1]))
            lm.append(language(model, sequence, h))
        task.append(cross_entropy(torch.cat(scores), torch.tensor(row["label"])))
    return torch.stack(task).mean(), torch.stack(lm).mean()


def losses(model, loss_of):
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=1e-6, weight_decay=0.0)
    found = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = LR * (STEPS - step) / STEPS
        task, lm = loss_of(model)
        loss = task + 0.5 * lm
        found.append([loss.item(), task.item(), lm.item()])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return found


golden = []
for name, task, file, loss_of in [
    ("sequence", "classify", "classify.jsonl", classify),
    ("regression", "regress", "regress.jsonl", regress),
    ("choice", "choice", "choice.jsonl", choose),
]:
    torch.manual_seed(0)
    build, config = MODELS[name]
    model = build(config).train()
    with torch.no_grad():
        for parameter in model.parameters():
            # Larger than initial values, so that sequences differ.
            parameter.mul_(4.0) if parameter.dim() > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(OUT / name)
    (OUT / name / "generation_config.json").unlink(missing_ok=True)
    golden.append({"model": name, "task": task, "file": file, "losses": losses(model, loss_of)})
    print(name, golden[-1]["losses"])
(OUT / "golden.json").write_text(json.dumps(golden, indent=1) + "\n")
