"""Check that transformers reads what henson saves of models that write: every family and head of tests-data/writers-golden.

    HF_HUB_OFFLINE=1 python tools/golden/check_saved_writers.py HENSON [FAMILY...]

Puts a vocabulary next to each model, converts it with the binary HENSON, and loads both directories: no key missing or unexpected,
and the same outputs, to the bit.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from safetensors.torch import load_file

GOLDEN = Path(__file__).resolve().parents[2] / "tests-data" / "writers-golden"


def load(directory):
    kind = getattr(transformers, json.loads((directory / "config.json").read_text())["architectures"][0])
    model, info = kind.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    for problem, keys in info.items():
        # MarianModel, unlike MarianMTModel, reports the sines and cosines that it makes.
        if model.config.model_type == "marian":
            keys = [key for key in keys if not key.endswith("embed_positions.weight")]
        if keys:
            sys.exit(f"FAIL: {directory}: {problem}: {sorted(map(str, keys))}")
    return model.eval()


@torch.no_grad()
def outputs(model, data):
    """Of the first sequence; it ends with the end token."""
    ids = data["input.ids"][: data["input.offsets"][1]][None]
    call = {"input_ids": ids}
    if "input.target_ids" in data:
        call["labels"] = data["input.target_ids"][: data["input.target_offsets"][1]][None]
    elif model.config.model_type == "marian":
        call["decoder_input_ids"] = ids
    return {name: value for name, value in model(**call).items() if isinstance(value, torch.Tensor)}


def main():
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    henson, families = sys.argv[1], sys.argv[2:]
    for config in sorted(GOLDEN.glob("*/*/config.json")):
        source = config.parent
        if families and source.parent.name not in families:
            continue
        with tempfile.TemporaryDirectory() as directory:
            own, saved = Path(directory) / "own", Path(directory) / "saved"
            shutil.copytree(source, own)
            words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz"]
            (own / "vocab.txt").write_text("\n".join(words) + "\n")
            subprocess.run([henson, "convert", own, saved], check=True, stdout=subprocess.DEVNULL)
            data = load_file(source / "golden.safetensors")
            model, again = load(own), load(saved)
            if type(model) is not type(again):
                sys.exit(f"FAIL: {source}: {type(model).__name__} became {type(again).__name__}")
            expected, found = outputs(model, data), outputs(again, data)
            same = expected.keys() == found.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
            if not same:
                sys.exit(f"FAIL: {source}: other outputs")
            print(f"{source.parent.name}/{source.name}: {type(again).__name__}, {', '.join(expected)}: the same")


if __name__ == "__main__":
    main()
