"""Make tests-data/granite/golden.json: what `transformers` computes with granite-embedding-30m-english, a real RoBERTa.

    HF_HUB_OFFLINE=1 python tools/golden/make_granite_golden.py MODEL_DIR [OUTPUT_FILE]

MODEL_DIR is what `cargo xtask granite` prints. For every text: its ids, and of the first token's last hidden state every
twelfth of 384 numbers.
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer

TEXTS = [
    "How do I reset my password?",
    "Steps to recover a forgotten login",
    "The cat sat on the warm windowsill.",
    "x",
    "naïve café, 3.14 × 10⁻⁵ – and an emoji 🙂",
    " two  spaces,\ttabs\nand lines ",
    "In 2019, Lewis et al. wrote (p. 12): 'denoising'; it's \"fine\" & <b>bold</b>.",
    "猫が窓辺に座っている。 Кошка сидит.",
    # Longer than the model reads.
    " ".join(["All work and no play makes Jack a dull boy."] * 60),
]


@torch.no_grad()
def main():
    model = Path(sys.argv[1])
    here = Path(__file__).resolve().parent.parent.parent
    out = Path(sys.argv[2]) if len(sys.argv) > 2 else here / "tests-data" / "granite" / "golden.json"
    network, report = transformers.RobertaModel.from_pretrained(model, output_loading_info=True, dtype=torch.float64)
    assert all("pooler" in key for key in report["missing_keys"]) and not report["unexpected_keys"], report
    network.eval()
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(512)
    rows = []
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        first = network(torch.tensor([ids])).last_hidden_state[0, 0]
        rows.append({"text": text, "ids": ids, "vector": [round(x, 6) for x in first[::12].tolist()]})
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n]\n")


if __name__ == "__main__":
    main()
