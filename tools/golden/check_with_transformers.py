"""Check that transformers can read a model directory that henson wrote.

    HF_HUB_OFFLINE=1 python tools/golden/check_with_transformers.py DIR [--against DIR2] [--no-tokenizer]

Loads DIR with the class its config.json names and with AutoTokenizer; fails (exit status 1) when a
weight is missing, unexpected or of another shape, or when an output is not finite. --against also
loads the directory DIR came from: the ids must be the same and the outputs within 1e-5.
--no-tokenizer is for directories with weights only: fixed random ids stand in for the sentences.
"""

import argparse
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import tokenizers
import torch
import transformers

LIMIT = 1e-5
SENTENCES = [
    "Hello",
    "The quick brown fox jumps over the lazy dog.",
    "Caf\u00e9 \u6771\u4eac, 3.14 \U0001f355 -- isn't it?",
    "Unbelievably long-winded explanations seldom help.",
]


def fail(message):
    sys.exit(f"FAIL: {message}")


def load_model(directory):
    architecture = json.loads((directory / "config.json").read_text(encoding="utf-8"))["architectures"][0]
    kind = getattr(transformers, architecture)
    model, info = kind.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    print(f"{directory}: {architecture}, {sum(p.numel() for p in model.parameters())} parameters")
    for problem, keys in info.items():
        if keys:
            fail(f"{directory}: {problem}: {sorted(map(str, keys))}")
    return model.eval()


def load_tokenizer(directory, model):
    # Without these files AutoTokenizer quietly makes a tokenizer of the five special tokens.
    if not any((directory / name).exists() for name in ["tokenizer.json", "vocab.txt"]):
        fail(f"{directory}: neither tokenizer.json nor vocab.txt (--no-tokenizer to go on without)")
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    if not 5 < len(tokenizer) <= model.config.vocab_size:
        fail(f"{directory}: {len(tokenizer)} tokens, but {model.config.vocab_size} embeddings")
    if (directory / "vocab.txt").exists():
        words = (directory / "vocab.txt").read_text(encoding="utf-8").removesuffix("\n").split("\n")
        if {word: i for i, word in enumerate(words)} != tokenizer.get_vocab():
            fail(f"{directory}: vocab.txt is not the vocabulary AutoTokenizer has")
    if (directory / "tokenizer.json").exists():  # transformers may rebuild it from the vocabulary
        plain = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        plain.no_padding()
        for sentence in SENTENCES:
            if plain.encode(sentence).ids != tokenizer(sentence)["input_ids"]:
                fail(f"{directory}: tokenizer.json and AutoTokenizer differ on {sentence!r}")
    return tokenizer


def make_batch(directory, model, use_tokenizer):
    if use_tokenizer:
        batch = dict(load_tokenizer(directory, model)(SENTENCES, padding=True, return_tensors="pt"))
    else:
        generator = torch.Generator().manual_seed(1)
        length = min(24, model.config.max_position_embeddings)
        ids = torch.randint(1, model.config.vocab_size, (len(SENTENCES), length), generator=generator)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if isinstance(model, transformers.BertForMultipleChoice):
        batch = {name: value.view(2, -1, value.shape[1]) for name, value in batch.items()}
    return batch


def run(model, batch):
    """All floating-point outputs by name, padding left out of the hidden states."""
    real = batch["attention_mask"].reshape(-1, batch["attention_mask"].shape[-1]).bool()
    with torch.no_grad():
        result = model(**batch, output_hidden_states=True)
    outputs = {}
    for name, value in result.items():
        if name == "hidden_states":
            outputs |= {f"{name}.{i}": state[real] for i, state in enumerate(value)}
        elif isinstance(value, torch.Tensor):
            outputs[name] = value[real] if value.shape[:2] == real.shape else value
    for name, value in outputs.items():
        if not value.isfinite().all():
            fail(f"{name} is not finite")
    return outputs


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--against", type=Path, metavar="DIR2")
    parser.add_argument("--no-tokenizer", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()

    model = load_model(args.directory)
    batch = make_batch(args.directory, model, not args.no_tokenizer)
    outputs = run(model, batch)
    for name, value in outputs.items():
        print(f"  {name} {list(value.shape)}, mean magnitude {value.abs().mean():.4f}")

    if args.against:
        other = load_model(args.against)
        other_batch = make_batch(args.against, other, not args.no_tokenizer)
        for name in batch.keys() | other_batch.keys():
            if name not in batch or name not in other_batch or not torch.equal(batch[name], other_batch[name]):
                fail(f"the inputs differ in {name}")
        others = run(other, other_batch)
        if type(model) is not type(other):
            print("different classes: only the outputs both have are compared")
        elif outputs.keys() != others.keys():
            fail("the outputs have different names")
        common = [name for name in outputs if name in others]
        worst = 0.0
        for name in common:
            if outputs[name].shape != others[name].shape:
                fail(f"{name}: {list(outputs[name].shape)} and {list(others[name].shape)}")
            difference = float((outputs[name] - others[name]).abs().max())
            print(f"  {name}: max abs difference {difference:.3g}")
            worst = max(worst, difference)
        if not common or worst > LIMIT:
            fail(f"max abs difference {worst:.3g} is over {LIMIT}")
        print(f"max abs difference {worst:.3g}")
    print("ok")


if __name__ == "__main__":
    main()
