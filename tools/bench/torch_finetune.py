"""transformers fine-tuning a BERT on a GLUE-style task on a GPU, for its speed on real lengths: bf16, batches padded to their
longest sequence, texts tokenized beforehand. Prints one JSON line with real tokens per second: padding does not count.

    python tools/bench/torch_finetune.py --model DIR --data glue --task mrpc --batch 16 --epochs 3 [--compile]
"""

import argparse
import json
import random
import time

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, get_linear_schedule_with_warmup

COLUMNS = {"mrpc": ("MRPC", 3, 4, 0, True), "sst2": ("SST-2", 0, None, 1, True), "cola": ("CoLA", 3, None, 1, False)}


def main():
    flags = argparse.ArgumentParser()
    for name in ("model", "data", "task"):
        flags.add_argument("--" + name, required=True)
    flags.add_argument("--batch", type=int, default=16)
    flags.add_argument("--epochs", type=int, default=3)
    flags.add_argument("--limit", type=int, default=0)
    flags.add_argument("--compile", action="store_true")
    flags = flags.parse_args()
    folder, first, second, label, header = COLUMNS[flags.task]
    lines = [line.rstrip("\n").split("\t") for line in open(f"{flags.data}/{folder}/train.tsv", encoding="utf-8-sig")]
    rows = lines[1:] if header else lines
    rows = rows[: flags.limit] if flags.limit else rows
    tokenizer = AutoTokenizer.from_pretrained(flags.model)
    texts = [row[first] for row in rows]
    pairs = [row[second] for row in rows] if second is not None else None
    encoded = tokenizer(texts, pairs, truncation=True, max_length=128)
    examples = [
        {"input_ids": ids, "token_type_ids": types, "attention_mask": mask}
        for ids, types, mask in zip(encoded["input_ids"], encoded["token_type_ids"], encoded["attention_mask"])
    ]
    labels = [int(row[label]) for row in rows]
    model = AutoModelForSequenceClassification.from_pretrained(flags.model, num_labels=2).cuda().train()
    forward = torch.compile(model, dynamic=True) if flags.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, weight_decay=0.01, fused=True)
    steps = flags.epochs * -(-len(examples) // flags.batch)
    schedule = get_linear_schedule_with_warmup(optimizer, steps // 10, steps)
    draws = random.Random(0)
    tokens, step, start, counted = 0, 0, time.perf_counter(), 0
    for _ in range(flags.epochs):
        order = list(range(len(examples)))
        draws.shuffle(order)
        for i in range(0, len(order), flags.batch):
            chosen = order[i : i + flags.batch]
            batch = tokenizer.pad([examples[j] for j in chosen], return_tensors="pt")
            batch = {key: value.cuda(non_blocking=True) for key, value in batch.items()}
            target = torch.tensor([labels[j] for j in chosen]).cuda(non_blocking=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = forward(**batch, labels=target).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            if step == 30:  # what is compiled and allocated at first does not count
                torch.cuda.synchronize()
                start, tokens, counted = time.perf_counter(), 0, step
            tokens += sum(len(examples[j]["input_ids"]) for j in chosen)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    print(json.dumps({
        "peer": "transformers", "task": flags.task, "batch": flags.batch, "compile": flags.compile,
        "steps_per_s": round((step - counted) / seconds, 1), "tokens_per_s": round(tokens / seconds), "seconds": round(seconds, 1),
    }))


if __name__ == "__main__":
    main()
