"""Check that transformers reads tokenizers that henson trained, and cuts texts in the same way.

    HF_HUB_OFFLINE=1 python tools/golden/check_tokenizers.py HENSON DIR...

HENSON is the binary, each DIR a directory from `henson tokenizer train`. For every text below, the ids,
the offsets and the decoded text of AutoTokenizer and of the tokenizers package must be those that
`henson tokenizer encode --json` gives; the special tokens around one text and two must be BERT's or
RoBERTa's; the five special tokens must be known by their roles. Each directory is tried as it is and
with the config.json of a BERT beside it, since AutoTokenizer looks at that too.
Fails (exit status 1) at the first difference.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import tokenizers
import transformers

TEXTS = [
    "Jim Henson was a puppeteer.",
    "The quick brown fox jumps over the lazy dog, doesn't it? 3.14 (1955)!",
    "Na\u00efve caf\u00e9s, na\u0131ve \u0130stanbul, Stra\u00dfe, \u00c5ngstr\u00f6m, e\u0301 \u0301",
    "\u4e2d\u6587\u548c\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8, \ud55c\uad6d\uc5b4, \u0e44\u0e17\u0e22",
    "\U0001f642 emoji \U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1eb\U0001f1f7 done",
    "  spaces \t tabs   and\u00a0others\u3000here  ",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u03ba\u03cc\u03c3\u03bc\u03b5! \u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627 \u0928\u092e\u0938\u094d\u0924\u0947",
    "\ufb01ne \u2460 \u00bd \u2122 \uff21\uff22\uff23 \u2581under \u0000zero\u200bwidth\ufeff",
    "antidisestablishmentarianism " + "x" * 120,
    "special [MASK] and <mask> and [CLS]</s> inside",
    "a",
]


def fail(message):
    sys.exit(f"FAIL: {message}")


def byte_offsets(text, offsets):
    starts = [0]
    for letter in text:
        starts.append(starts[-1] + len(letter.encode()))
    return [[starts[start], starts[end]] for start, end in offsets]


def henson(binary, directory):
    command = [binary, "tokenizer", "encode", "--model", directory, "--json"]
    texts = "".join(text + "\n" for text in TEXTS).encode()
    lines = subprocess.run(command, input=texts, capture_output=True, check=False)
    if lines.returncode:
        fail(lines.stderr.decode())
    return [json.loads(line) for line in lines.stdout.decode().splitlines()]


def check(binary, directory):
    expected = henson(binary, directory)
    plain = tokenizers.Tokenizer.from_file(str(Path(directory) / "tokenizer.json"))
    auto = transformers.AutoTokenizer.from_pretrained(directory)
    for text, line in zip(TEXTS, expected, strict=True):
        encoding = plain.encode(text, add_special_tokens=False)
        found = auto(text, add_special_tokens=False, return_offsets_mapping=True)
        for name, ids, offsets in [
            ("tokenizers", encoding.ids, encoding.offsets),
            ("AutoTokenizer", found["input_ids"], found["offset_mapping"]),
        ]:
            if ids != line["ids"]:
                fail(f"{directory}, {name}, {text!r}: ids {ids}, expected {line['ids']}")
            if byte_offsets(text, offsets) != line["offsets"]:
                fail(f"{directory}, {name}, {text!r}: offsets {offsets}, expected {line['offsets']}")
        decoded = plain.decode(line["ids"], skip_special_tokens=False)
        if auto.decode(line["ids"], clean_up_tokenization_spaces=False) != decoded:
            fail(f"{directory}, {text!r}: decoded otherwise")

    roberta = auto.cls_token == "<s>"
    a, b = (auto(text, add_special_tokens=False)["input_ids"] for text in ("one text", "another"))
    cls, sep = auto.cls_token_id, auto.sep_token_id
    single = [cls, *a, sep]
    pair = [*single, sep, *b, sep] if roberta else [*single, *b, sep]
    segments = [0] * len(pair) if roberta else [0] * len(single) + [1] * (len(b) + 1)
    both = plain.encode("one text", "another")
    if auto("one text")["input_ids"] != single or plain.encode("one text").ids != single:
        fail(f"{directory}: special tokens around one text")
    if auto("one text", "another")["input_ids"] != pair or both.ids != pair:
        fail(f"{directory}: special tokens around two texts")
    if both.type_ids != segments:
        fail(f"{directory}: segments {both.type_ids}")
    for role in ["cls_token", "sep_token", "mask_token", "pad_token", "unk_token"]:
        token = getattr(auto, role)
        if token is None or plain.token_to_id(token) != getattr(auto, role + "_id"):
            fail(f"{directory}: {role} is {token}")
    if len(auto) != plain.get_vocab_size():
        fail(f"{directory}: {len(auto)} tokens, {plain.get_vocab_size()} in tokenizer.json")
    unknown = sum(line["ids"].count(auto.unk_token_id) for line in expected)
    pieces = sum(len(line["ids"]) for line in expected)
    return f"{type(auto).__name__}, {len(auto)} tokens, {pieces} pieces, {unknown} unknown"


def main():
    binary, *directories = sys.argv[1:]
    for directory in directories:
        print(f"{directory}: {check(binary, directory)}")
        with tempfile.TemporaryDirectory() as copy:
            shutil.copytree(directory, copy, dirs_exist_ok=True)
            (Path(copy) / "config.json").write_text('{"model_type": "bert"}')
            print(f"  beside a BERT's config: {check(binary, copy)}")
    print(f"the same as transformers {transformers.__version__}, tokenizers {tokenizers.__version__}")


main()
