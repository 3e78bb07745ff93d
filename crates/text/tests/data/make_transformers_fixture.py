"""Writes transformers/: small tokenizers as transformers saves them, and what it makes of some texts.

Run in this folder: python make_transformers_fixture.py   (transformers 5.22.2, tokenizers 0.23.3)
"""

import json
import pathlib
import shutil

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import BertTokenizer, PreTrainedTokenizerFast, RobertaTokenizer

here = pathlib.Path(__file__).parent / "transformers"
shutil.rmtree(here, ignore_errors=True)

words = "jim hen ##son was a pupp ##et ##eer . ##s ' the cafe muppet in".split()
specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
bert = BertTokenizer(vocab={token: id for id, token in enumerate(specials + words)}, model_max_length=64)
bert.add_tokens(["Kermit"])

# The alphabet of byte-level BPE, then merges for a few words.
printable = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
others = [byte for byte in range(256) if byte not in printable]
alphabet = [chr(byte) for byte in printable] + [chr(256 + i) for i in range(len(others))]
merges = [("h", "e"), ("n", "s"), ("he", "ns"), ("o", "n"), ("hens", "on"), ("\u0120", "hens"), ("\u0120hens", "on"), ("\u0120", "a")]
tokens = ["<s>", "<pad>", "</s>", "<unk>"] + alphabet + [a + b for a, b in merges] + ["<mask>"]
roberta = RobertaTokenizer(vocab={token: id for id, token in enumerate(tokens)}, merges=merges, model_max_length=32)

# ModernBERT's: the same merges, BERT's special tokens behind them, of which the mask takes the space on its left.
tokens = alphabet + [a + b for a, b in merges]
modernbert = Tokenizer(models.BPE({token: id for id, token in enumerate(tokens)}, merges))
modernbert.normalizer = normalizers.NFC()
modernbert.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
modernbert.decoder = decoders.ByteLevel()
modernbert.add_special_tokens(["[UNK]", "[CLS]", "[SEP]", "[PAD]", AddedToken("[MASK]", lstrip=True, special=True)])
modernbert.post_processor = processors.TemplateProcessing(
    single="[CLS] $A [SEP]",
    pair="[CLS] $A [SEP] $B [SEP]",
    special_tokens=[(token, modernbert.token_to_id(token)) for token in ("[CLS]", "[SEP]")],
)
names = {f"{name.lower()}_token": f"[{name}]" for name in ("UNK", "CLS", "SEP", "PAD", "MASK")}
modernbert = PreTrainedTokenizerFast(tokenizer_object=modernbert, model_max_length=8192, **names)

texts = [
    "Jim Henson was a puppeteer.",
    "the caf\u00e9's Muppet",
    "a [MASK] b <mask> c",
    "Kermit kermit in  the \u4e2d caf\u00e9",
    "henson henson  a \U0001f438",
    "",
]
for name, tokenizer in [("bert", bert), ("roberta", roberta), ("modernbert", modernbert)]:
    tokenizer.save_pretrained(here / name)
    rows = []
    for first in texts:
        one = tokenizer(first, return_offsets_mapping=True, add_special_tokens=False)
        two = tokenizer(first, texts[0], return_token_type_ids=True)
        rows.append({
            "text": first,
            "ids": one["input_ids"],
            "code_point_offsets": one["offset_mapping"],
            "pair_ids": two["input_ids"],
            "pair_segments": two["token_type_ids"],
            "decoded": tokenizer.decode(two["input_ids"], skip_special_tokens=True, clean_up_tokenization_spaces=False),
        })
    expected = {"pair_with": texts[0], "rows": rows, "length": len(tokenizer)}
    (here / name / "expected.json").write_text(json.dumps(expected, indent=1, ensure_ascii=False) + "\n")
