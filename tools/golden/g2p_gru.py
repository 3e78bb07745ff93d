"""Opens the public GRU for grapheme to phoneme (PyPI g2p-en 2.1.0, Apache-2.0) with henson: same phones?

    python tools/golden/g2p_gru.py checkpoint20.npz words.txt HENSON WORK

Writes the twelve arrays as a model directory of the family rnn-seq2seq into WORK (letters and phones become one vocabulary, and letters
get a bias that they are never written with), lets `HENSON generate` write the phones of the words (one on each line), and compares with
what numpy computes from the arrays. The weights are 3.3 MB, so no test has them.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy
from safetensors.numpy import save_file

LETTERS = ["<pad>", "<unk>", "</s>", *"abcdefghijklmnopqrstuvwxyz"]
VOWELS = ["AA", "AE", "AH", "AO", "AW", "AY", "EH", "ER", "EY", "IH", "IY", "OW", "OY", "UH", "UW"]
CONSONANTS = "B CH D DH F G HH JH K L M N NG P R S SH T TH UW V W Y Z ZH".split()
PHONES = ["<pad>", "<unk>", "<s>", "</s>"] + sorted([v + stress for v in VOWELS for stress in "012"] + CONSONANTS)


def sigmoid(x):
    return 1 / (1 + numpy.exp(-x))


def step(x, h, w, part):
    gates = x @ w[part + "_w_ih"].T + w[part + "_b_ih"]
    own = h @ w[part + "_w_hh"].T + w[part + "_b_hh"]
    (r, z, n), (hr, hz, hn) = numpy.split(gates, 3), numpy.split(own, 3)
    r, z = sigmoid(r + hr), sigmoid(z + hz)
    n = numpy.tanh(n + r * hn)
    return (1 - z) * n + z * h


def phones(word, w):
    h = numpy.zeros(256)
    for letter in [*word, "</s>"]:
        h = step(w["enc_emb"][LETTERS.index(letter)], h, w, "enc")
    token, found = PHONES.index("<s>"), []
    for _ in range(20):
        h = step(w["dec_emb"][token], h, w, "dec")
        token = int(numpy.argmax(w["fc_w"] @ h + w["fc_b"]))
        if PHONES[token] == "</s>":
            break
        found.append(PHONES[token])
    return found


def directory(w, path):
    letters, total = len(LETTERS), len(LETTERS) + len(PHONES)
    f32 = lambda x: numpy.ascontiguousarray(x, dtype=numpy.float32)
    tensors = {"model.shared.weight": f32(numpy.concatenate([w["enc_emb"], w["dec_emb"]]))}
    for part, name in [("enc", "encoder"), ("dec", "decoder")]:
        for what, key in [("weight_ih", "w_ih"), ("weight_hh", "w_hh"), ("bias_ih", "b_ih"), ("bias_hh", "b_hh")]:
            tensors[f"model.{name}.{what}_l0"] = f32(w[f"{part}_{key}"])
    tensors["lm_head.weight"] = f32(numpy.concatenate([numpy.zeros((letters, 256)), w["fc_w"]]))
    tensors["lm_head.bias"] = f32(numpy.concatenate([numpy.full(letters, -1e9), w["fc_b"]]))
    config = dict(
        model_type="rnn-seq2seq", architectures=["RnnSeq2SeqForConditionalGeneration"], vocab_size=total, embedding_size=256,
        hidden_size=256, num_hidden_layers=1, cell="gru", bidirectional=False, attention="none", dropout=0.0,
        pad_token_id=0, eos_token_id=letters + 3, decoder_start_token_id=letters + 2,
    )
    names = LETTERS + [f"<phone{p}" if p.startswith("<") else p for p in PHONES]
    end = {"SpecialToken": {"id": "</s>", "type_id": 0}}
    text = lambda name: {"Sequence": {"id": name, "type_id": 0}}
    special = [i for i, name in enumerate(names) if name.startswith("<")]
    tokenizer = dict(
        version="1.0", truncation=None, padding=None, normalizer=None, decoder=None,
        added_tokens=[
            dict(id=i, content=names[i], single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
            for i in special
        ],
        pre_tokenizer={"type": "WhitespaceSplit"},
        post_processor={
            "type": "TemplateProcessing", "single": [text("A"), end], "pair": [text("A"), end, text("B"), end],
            "special_tokens": {"</s>": {"id": "</s>", "ids": [2], "tokens": ["</s>"]}},
        },
        model={"type": "WordLevel", "vocab": {name: i for i, name in enumerate(names)}, "unk_token": "<unk>"},
    )
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (path / "tokenizer_config.json").write_text(json.dumps({"unk_token": "<unk>", "pad_token": "<pad>"}))


def main(npz, words, henson, work):
    w = {name: x.astype(numpy.float64) for name, x in numpy.load(npz).items()}
    assert len(w["dec_emb"]) == len(PHONES) and len(w["enc_emb"]) == len(LETTERS)
    assert phones("activation", w) == "AE2 K T IH0 V EY1 SH AH0 N".split()
    directory(w, Path(work))
    words = [word for word in Path(words).read_text().split() if word.isascii() and word.isalpha() and word.islower()]
    texts = "".join(" ".join(word) + "\n" for word in words)
    (Path(work) / "words.txt").write_text(texts)
    command = [henson, "generate", "--model", work, "--max-new-tokens", "20", "--json", "--file", f"{work}/words.txt"]
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    written = [json.loads(line) for line in out.splitlines()]
    differ = 0
    for word, line in zip(words, written, strict=True):
        got = line["text"]
        if got.split() != phones(word, w):
            differ += 1
            print(word, got, " ".join(phones(word, w)))
    print(f"{len(words)} words, {differ} differ")
    return differ


if __name__ == "__main__":
    sys.exit(1 if main(*sys.argv[1:]) else 0)
