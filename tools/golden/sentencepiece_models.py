"""SentencePiece models, lines of many kinds, and what the sentencepiece package makes of them.

    python tools/golden/sentencepiece_models.py train DATA WORK
    python tools/golden/sentencepiece_models.py check WORK ENCODE_LINES
    python tools/golden/sentencepiece_models.py families WORK ENCODE_LINES
    python tools/golden/sentencepiece_models.py sample DATA crates/text/tests/data/sentencepiece

`train` makes small models of every kind into WORK from texts in DATA (a file of English lines, English and German
in pairs) and the sentences below, and 10,000 lines. `check` encodes all lines with every model by ENCODE_LINES (the
example of crates/text: `cargo build -p henson-text --example encode_lines`) and by sentencepiece, and counts the lines
whose ids or offsets differ: directly, and after the tokenizer was saved and opened again. `families` compares
directories that hold nothing but such a file and a tokenizer_config.json with transformers, and with the package alone.
`sample` writes what the tests need: smaller models, whose character table has a part of nmt_nfkc's rules (the whole has
240 KB), some lines, and their ids by sentencepiece and transformers.

The committed files come from sentencepiece 0.2.2, transformers 5.22.2.
"""

import gzip
import json
import os
import random
import shutil
import subprocess
import sys
import unicodedata
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import sentencepiece as spm
from sentencepiece import sentencepiece_model_pb2 as pb

SENTENCES = [
    "The old bridge was closed for repairs, so we walked along the river instead.",
    "Die alte Brücke war gesperrt, deshalb gingen wir am Fluss entlang; es regnete größtenteils.",
    "Le vieux pont était fermé, alors nous avons marché le long de la rivière jusqu'à l'aube.",
    "El puente viejo estaba cerrado; ¿caminamos por la orilla del río mañana?",
    "A ponte velha estava fechada, então caminhamos à beira do rio até o amanhecer.",
    "Il vecchio ponte era chiuso, perciò abbiamo camminato lungo il fiume.",
    "De oude brug was dicht, dus liepen we langs de rivier.",
    "Stary most był zamknięty, więc poszliśmy wzdłuż rzeki aż do świtu.",
    "Starý most byl zavřený, a tak jsme šli podél řeky až do úsvitu.",
    "A régi híd zárva volt, ezért a folyó mentén sétáltunk hajnalig.",
    "Vanha silta oli suljettu, joten kävelimme joen vartta aamuun asti.",
    "Eski köprü kapalıydı, bu yüzden İstanbul'da ırmak boyunca yürüdük.",
    "Cây cầu cũ đã đóng cửa, nên chúng tôi đi bộ dọc bờ sông đến sáng.",
    "Старый мост был закрыт, поэтому мы пошли вдоль реки до самого рассвета.",
    "Старий міст був зачинений, тому ми пішли вздовж річки аж до світанку.",
    "Η παλιά γέφυρα ήταν κλειστή, γι' αυτό περπατήσαμε δίπλα στο ποτάμι.",
    "הגשר הישן היה סגור, לכן הלכנו לאורך הנהר עד הבוקר.",
    "كان الجسر القديم مغلقًا، لذلك مشينا على طول النهر حتى الفجر.",
    "پل قدیمی بسته بود، بنابراین تا سپیده‌دم کنار رودخانه راه رفتیم.",
    "पुराना पुल बंद था, इसलिए हम भोर तक नदी के किनारे चलते रहे।",
    "পুরোনো সেতুটি বন্ধ ছিল, তাই আমরা ভোর পর্যন্ত নদীর ধারে হাঁটলাম।",
    "பழைய பாலம் மூடப்பட்டிருந்தது, எனவே நாங்கள் ஆற்றங்கரையில் நடந்தோம்.",
    "สะพานเก่าปิดซ่อม เราจึงเดินเลียบแม่น้ำจนรุ่งเช้า",
    "旧桥封闭了，所以我们沿着河边一直走到天亮。",
    "古い橋は閉鎖されていたので、私たちは夜明けまで川沿いを歩いた。",
    "낡은 다리가 닫혀 있어서 우리는 새벽까지 강을 따라 걸었다.",
    "ძველი ხიდი დაკეტილი იყო, ამიტომ მდინარის გასწვრივ გავიარეთ.",
    "Հին կամուրջը փակ էր, ուստի մենք քայլեցինք գետի երկայնքով։",
    "የድሮው ድልድይ ተዘግቶ ስለነበር በወንዙ ዳር ተጓዝን።",
]

SYMBOLS = ["<sep2>", "New York", "\U0001f917", "ab", "abc", "\ufb01x", "  gap"]
CONTROL = ["[X]", "<ctl>"]


def corpus(data):
    english = [line.strip() for line in (data / "demo-corpus/demo-corpus.txt").read_text().splitlines() if line.strip()]
    with gzip.open(data / "tatoeba-en-de/train.tsv.gz", "rt") as file:
        german = [line.rstrip("\n").split("\t")[-1] for line in file]
    return english, german


def make_lines(data, count=10_000):
    """Lines of many kinds; the seed makes them the same each time."""
    draw = random.Random(19)
    english, german = corpus(data)
    ranges = [(0x20, 0x7F), (0xA0, 0x250), (0x250, 0x370), (0x370, 0x600), (0x600, 0x900), (0x900, 0x1000),
              (0x1100, 0x1200), (0x1E00, 0x2000), (0x2000, 0x2100), (0x2100, 0x2400), (0x2460, 0x2500), (0x2E80, 0x3100),
              (0x3100, 0x3400), (0x4E00, 0x5000), (0xAC00, 0xAE00), (0xF900, 0xFB00), (0xFB00, 0xFE00), (0xFE00, 0xFFF0),
              (0x1D400, 0x1D800), (0x1F1E6, 0x1F200), (0x1F300, 0x1F700), (0x20000, 0x20100), (0xE0000, 0xE0080)]
    marks = [chr(c) for c in range(0x300, 0x370)] + [chr(c) for c in range(0x1AB0, 0x1AC0)] + ["\u20dd", "\u0e31", "\u094d"]
    spaces = [" ", "  ", "\t", "\u00a0", "\u2003", "\u3000", "\u200b", "\u2028", "\u0085", "\n", "\r\n", "\u202f", "\ufeff"]
    controls = [chr(c) for c in range(0x20)] + [chr(c) for c in range(0x7F, 0xA0)] + ["\u200d", "\u200e", "\u00ad", "\u2060"]
    emoji = ["\U0001f642", "\U0001f469\u200d\U0001f469\u200d\U0001f467", "\U0001f1eb\U0001f1f7", "\U0001f44d\U0001f3fd", "\u2764\ufe0f",
             "1\ufe0f\u20e3", "\U0001f3f4\u200d\u2620\ufe0f", "\U0001f917"]
    odd = ["\ufb01", "\ufb01\u0301", "\ufdfa", "\u338f", "\u2460", "\u00bd", "\u2122", "\uff21\uff42\uff13", "\uff76\uff9e", "\u1100\u1161\u11a8", "e\u0323\u0302",
           "\u2581", "\u2581\u2581", "<s>", "</s>", "<unk>", "<0x41>", "[X]", "<ctl>", "[MASK]", "\u0130", "\u1e9e", "\u03a3\u03c2", "\u212b", "\u2126",
           "``quoted''", "1,000", "2,", "x" * 70, "\uff5e", "\u301c", "\u0340", "\u0344", "\ufffd"] + SYMBOLS

    def letter():
        while True:
            first, last = draw.choice(ranges)
            found = chr(draw.randrange(first, last))
            if unicodedata.category(found) != "Cs":
                return found

    def words(line):
        return line.split(" ")

    kinds = [
        lambda: draw.choice(english),
        lambda: draw.choice(german),
        lambda: draw.choice(SENTENCES),
        lambda: " ".join(draw.choice(words(draw.choice(SENTENCES))) for _ in range(draw.randrange(1, 12))),
        lambda: unicodedata.normalize("NFD", draw.choice(SENTENCES)),
        lambda: unicodedata.normalize("NFKD", draw.choice(SENTENCES + german)),
        lambda: draw.choice(english).upper(),
        lambda: "".join(letter() for _ in range(draw.randrange(1, 40))),
        lambda: "".join(draw.choice("aeiouyAEIOUnstc \ufb01\u1100\u1161") + "".join(draw.choices(marks, k=draw.randrange(4))) for _ in range(20)),
        lambda: "".join(draw.choice(emoji) + draw.choice(["", " ", "ok"]) for _ in range(draw.randrange(1, 10))),
        lambda: "".join(word + draw.choice(spaces) * draw.randrange(1, 4) for word in words(draw.choice(english))[:12]),
        lambda: draw.choice(spaces) + draw.choice(SENTENCES) + draw.choice(spaces),
        lambda: "".join(draw.choice([letter, lambda: draw.choice(controls), lambda: draw.choice("abc ")])() for _ in range(30)),
        lambda: "".join(chr(ord(c) + 0xFEE0) if 0x21 <= ord(c) < 0x7F else c for c in draw.choice(english)[:60]),
        lambda: "".join(draw.choice(odd) + draw.choice(["", " ", "a", "  "]) for _ in range(draw.randrange(1, 9))),
        lambda: "".join(draw.choice(words(draw.choice(english + german))) for _ in range(draw.randrange(5, 60))),
        lambda: draw.choice(["a", "ab", "abc", "ha", "\u4e2d", "."]) * draw.randrange(1, 300),
        lambda: str(draw.random()) + " " + str(draw.randrange(10**12)) + f" {draw.randrange(10**6):,}",
        lambda: draw.choice(english)[: draw.randrange(80)] + draw.choice(odd) + draw.choice(german)[: draw.randrange(80)],
    ]
    lines = ["", " ", "   ", "\t", "\n", "\u3000", "\u2581", "\u200b", "\x00", "a", "x" * 20_000, "ab" * 5_000 + " end", "a\x00b"]
    while len(lines) < count:
        lines.append(kinds[len(lines) % len(kinds)]())
    return lines


def some_rules(path):
    """A part of nmt_nfkc, with casefolding of some letters: lines of code points, from and to."""
    hexes = lambda text: " ".join(f"{ord(letter):X}" for letter in text)
    rules = {chr(c): " " for c in [0x9, 0xA, 0xD, 0xA0, 0x2003, 0x3000, 0x2028, 0x200B, 0x2581]}
    rules |= {chr(c): "" for c in [*range(1, 9), *range(0xB, 0xD), *range(0xE, 0x20), 0x7F, 0x200E, 0xFFFD]}
    singles = [*range(0xFF01, 0xFF5F), *range(0xFF66, 0xFFA0), *range(0x2460, 0x2470), 0xBD, 0x2122, 0x338F, 0x212B, *range(0xFB00, 0xFB07), 0xFDFA]
    rules |= {chr(c): unicodedata.normalize("NFKC", chr(c)) for c in singles}
    pairs = [base + mark for base in "aeiouyAEIOUncs" for mark in "\u0300\u0301\u0302\u0303\u0308\u0323\u030c"]
    pairs += ["e\u0323\u0302", "\u1100\u1161", "\u1100\u1161\u11a8", "\uff76\uff9e", "\uff8a\uff9f"]
    composed = {pair: unicodedata.normalize("NFKC", pair) for pair in pairs}
    rules |= {pair: to for pair, to in composed.items() if to != pair}
    path.write_text("".join(f"{hexes(source)}\t{hexes(to)}\n" for source, to in rules.items()))


def train(data, work, small=False):
    work.mkdir(parents=True, exist_ok=True)
    english, german = corpus(data)
    draw = random.Random(7)
    text = draw.sample(english, 4000) + draw.sample(german, 3000) + SENTENCES * 12
    text += ["New York is big", "tabs\tand  gaps"]
    # Rules of one's own: from and to, in code points.
    rules = work / "rules.tsv"
    table = work / "table.tsv"
    some_rules(table)
    rules.write_text("41\t61 61\nDF\t73 73\n65 301\tE9\n2C6\t\n9\t20\n3000\t20 20\n66 66 69\tFB03\n")

    def one(name, **options):
        settings = {"hard_vocab_limit": False, "character_coverage": 0.998, "num_threads": 2, "minloglevel": 2}
        settings.update(options)
        if small:
            settings.update(vocab_size=settings["vocab_size"] // 3, character_coverage=0.985)
            if settings.get("normalization_rule_name") != "identity" and "normalization_rule_tsv" not in settings:
                settings["normalization_rule_tsv"] = str(table)
            if settings.get("byte_fallback"):
                settings["vocab_size"] += 256
        spm.SentencePieceTrainer.train(sentence_iterator=iter(text), model_prefix=str(work / name), **settings)
        (work / f"{name}.vocab").unlink()

    def edited(name, source, edit):
        model = pb.ModelProto.FromString((work / f"{source}.model").read_bytes())
        edit(model)
        (work / f"{name}.model").write_bytes(model.SerializeToString())

    def with_unused(model):
        for number, piece in enumerate(model.pieces):
            if piece.type == 1 and len(piece.piece) > 1 and number % 3 == 0:
                piece.type = 5

    def unescaped(model):
        model.normalizer_spec.escape_whitespaces = False
        for piece in model.pieces:
            if piece.type == 1:
                piece.piece = piece.piece.replace("\u2581", " ")

    one("unigram", model_type="unigram", vocab_size=1500)
    one("unigram-bytes", model_type="unigram", vocab_size=1500, byte_fallback=True, normalization_rule_name="nmt_nfkc_cf",
        user_defined_symbols=SYMBOLS, control_symbols=CONTROL)
    one("unigram-identity", model_type="unigram", vocab_size=1200, normalization_rule_name="identity", add_dummy_prefix=False,
        user_defined_symbols=SYMBOLS)
    one("unigram-rules", model_type="unigram", vocab_size=1000, normalization_rule_tsv=str(rules), split_by_whitespace=False)
    one("unigram-suffix", model_type="unigram", vocab_size=600, treat_whitespace_as_suffix=True, normalization_rule_name="nfkc")
    one("bpe", model_type="bpe", vocab_size=1500)
    one("bpe-bytes", model_type="bpe", vocab_size=1500, byte_fallback=True, normalization_rule_name="identity",
        remove_extra_whitespaces=False, split_digits=True, allow_whitespace_only_pieces=True)
    one("bpe-symbols", model_type="bpe", vocab_size=1000, user_defined_symbols=SYMBOLS, control_symbols=CONTROL,
        normalization_rule_name="nfkc_cf", remove_extra_whitespaces=False)
    one("bpe-suffix", model_type="bpe", vocab_size=600, treat_whitespace_as_suffix=True, normalization_rule_name="identity")
    edited("unigram-unused", "unigram", with_unused)
    edited("bpe-unused", "bpe", with_unused)
    edited("unigram-unescaped", "unigram", unescaped)

    one("albert", model_type="unigram", vocab_size=1000, pad_id=0, unk_id=1, bos_id=-1, eos_id=-1,
        control_symbols=["[CLS]", "[SEP]", "[MASK]"])
    one("deberta", model_type="unigram", vocab_size=1000, pad_id=0, bos_id=1, eos_id=2, unk_id=3, pad_piece="[PAD]",
        bos_piece="[CLS]", eos_piece="[SEP]", unk_piece="[UNK]")
    one("t5", model_type="unigram", vocab_size=1000, pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    one("xlnet", model_type="unigram", vocab_size=1000,
        control_symbols=["<cls>", "<sep>", "<pad>", "<mask>", "<eod>", "<eop>"])
    rules.unlink()
    table.unlink()
    if small:
        return
    with gzip.open(work / "lines.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(line) + "\n" for line in make_lines(data))
    print(*(f"{path.name}: {path.stat().st_size}" for path in sorted(work.glob("*.model"))), sep="\n")


def read_lines(work):
    with gzip.open(work / "lines.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


def henson(binary, path, lines, *flags):
    text = "".join(json.dumps(line) + "\n" for line in lines)
    run = subprocess.run([*binary.split(), str(path), *flags], input=text.encode(), capture_output=True, check=False)
    if run.returncode:
        sys.exit(f"FAIL: {path}: {run.stderr.decode()}")
    return [json.loads(line) for line in run.stdout.decode().splitlines()]


def show(line, ours, theirs):
    print(f"  {line[:60]!r}\n    henson {ours[:40]}\n    other  {theirs[:40]}")


def check(work, binary):
    lines, bad = read_lines(work), 0
    for path in sorted(work.glob("*.model")):
        theirs = spm.SentencePieceProcessor(model_file=str(path))
        wanted = [theirs.encode(line) for line in lines]
        for flags in [(), ("--save", str(work / "saved" / path.stem))]:
            if flags and "suffix" in path.name:
                continue
            found = henson(binary, path, lines, *flags)
            differing = [n for n, (ours, ids) in enumerate(zip(found, wanted, strict=True)) if ours["ids"] != ids]
            unknown = sum(theirs.unk_id() in ids for ids in wanted)
            print(f"{path.name:24} {'saved ' if flags else 'direct'} {len(differing)} of {len(lines)} lines differ ({unknown} with unknown pieces)")
            for n in differing[:3]:
                show(lines[n], found[n]["ids"], wanted[n])
            bad += len(differing)
    sys.exit(1 if bad else 0)


FAMILIES = {
    # The directory's name: the model, the file's name there, tokenizer_config.json.
    "albert": ("albert", "spiece.model", {"tokenizer_class": "AlbertTokenizer"}),
    "albert-cased": ("albert", "spiece.model", {"tokenizer_class": "AlbertTokenizer", "do_lower_case": False, "keep_accents": True}),
    "xlm-roberta": ("unigram", "sentencepiece.bpe.model", {"tokenizer_class": "XLMRobertaTokenizer"}),
    "camembert": ("unigram", "sentencepiece.bpe.model", {"tokenizer_class": "CamembertTokenizer"}),
    "deberta-v2": ("deberta", "spm.model", {"tokenizer_class": "DebertaV2Tokenizer"}),
    "deberta-v2-lower": ("deberta", "spm.model", {"tokenizer_class": "DebertaV2Tokenizer", "do_lower_case": True}),
    "t5": ("t5", "spiece.model", {"tokenizer_class": "T5Tokenizer"}),
    "t5-few": ("t5", "spiece.model", {"tokenizer_class": "T5Tokenizer", "extra_ids": 5}),
    "xlnet": ("xlnet", "spiece.model", {"tokenizer_class": "XLNetTokenizer"}),
}
MASKED = ["Jim Henson was a MASK puppeteer.", "MASK", "a MASKMASK b", "The  MASK, 1,000 and 2, or ``so''."]


def family_directory(work, family):
    source, name, config = FAMILIES[family]
    directory = work / "families" / family
    directory.mkdir(parents=True, exist_ok=True)
    (directory / name).write_bytes((work / f"{source}.model").read_bytes())
    (directory / "tokenizer_config.json").write_text(json.dumps(config) + "\n")
    return directory


def as_sentencepiece(family, processor, line):
    """The ids by the package alone: what transformers' older classes ("slow" ones) did. None where special tokens are in the line."""
    if any(special in line for special in ["<s>", "</s>", "<unk>", "<mask>", "[MASK]", "[CLS]", "[SEP]", "<extra_id_"]):
        return None
    if family.startswith(("albert", "xlnet")):
        line = " ".join(line.strip().split()).replace("``", '"').replace("''", '"')
        if "cased" not in family:
            line = unicodedata.normalize("NFKD", line)
            line = "".join(c for c in line if unicodedata.category(c)[0] != "M")
        line = line.lower() if family == "albert" else line
    if family == "deberta-v2-lower":
        line = line.lower()
    ids = processor.encode(line)
    shift = {"xlm-roberta": lambda i: [3, 0, 2][i] if i < 3 else i + 1, "camembert": lambda i: i + 4 if i else 3}
    ids = [shift.get(family, lambda i: i)(i) for i in ids]
    around = {"xlm-roberta": ([0], [2]), "camembert": ([5], [6]), "deberta-v2": ([1], [2]), "deberta-v2-lower": ([1], [2]),
              "albert": ([2], [3]), "albert-cased": ([2], [3]), "t5": ([], [1]), "t5-few": ([], [1]), "xlnet": ([], [4, 3])}
    before, after = around[family]
    return before + ids + after


def families(work, binary):
    from transformers import AutoTokenizer

    plain = [line for line in read_lines(work) if line.isascii() and line.isprintable()][:2000] + SENTENCES
    everything = read_lines(work)
    for family in FAMILIES:
        directory = family_directory(work, family)
        theirs = AutoTokenizer.from_pretrained(directory)
        mask = theirs.mask_token or "<extra_id_0>"
        lines = [text.replace("MASK", mask) for text in MASKED] + plain
        saved = work / "saved" / family
        for name, texts in [("plain", lines), ("all", everything)]:
            wanted = [theirs(line)["input_ids"] for line in texts]
            found = henson(binary, directory, texts, "--template", "--save", str(saved))
            differing = [n for n, (ours, ids) in enumerate(zip(found, wanted, strict=True)) if ours["ids"] != ids]
            print(f"{family:18} {name:6} {len(differing)} of {len(texts)} lines differ from transformers")
            for n in differing[:4]:
                show(texts[n], found[n]["ids"], wanted[n])
        processor = spm.SentencePieceProcessor(model_file=str(work / f"{FAMILIES[family][0]}.model"))
        wanted = [as_sentencepiece(family, processor, line) for line in everything]
        differing = [n for n, ids in enumerate(wanted) if ids is not None and found[n]["ids"] != ids]
        compared = sum(ids is not None for ids in wanted)
        print(f"{family:18} {len(differing)} of {compared} lines differ from the sentencepiece package with the family's special tokens")
        for n in differing[:4]:
            show(everything[n], found[n]["ids"], wanted[n])
        # What we saved, in transformers.
        theirs = AutoTokenizer.from_pretrained(saved)
        found = henson(binary, directory, lines, "--template")
        differing = [n for n, line in enumerate(lines) if theirs(line)["input_ids"] != found[n]["ids"]]
        print(f"{family:18} {len(differing)} of {len(lines)} plain lines differ between henson and transformers on what henson saved")
        for n in differing[:2]:
            show(lines[n], found[n]["ids"], theirs(lines[n])["input_ids"])


def sample(data, out):
    from transformers import AutoTokenizer

    train(data, out, small=True)
    for name in ["unigram-unescaped", "unigram-suffix"]:
        (out / f"{name}.model").unlink()
    lines = [line for line in make_lines(data, 600) if len(line) < 120][:100]
    ids = {}
    families_only = {source for source, _, _ in FAMILIES.values()} - {"unigram"}
    for path in sorted(path for path in out.glob("*.model") if path.stem not in families_only):
        processor = spm.SentencePieceProcessor(model_file=str(path))
        ids[path.stem] = [processor.encode(line) for line in lines]
    golden = {"lines": lines, "ids": ids, "families": {}}
    for family, (source, name, config) in FAMILIES.items():
        directory = family_directory(out, family)
        theirs = AutoTokenizer.from_pretrained(directory)
        mask = theirs.mask_token or "<extra_id_0>"
        texts = [text.replace("MASK", mask) for text in MASKED] + SENTENCES[:14]
        pair = theirs("Jim Henson", "a puppeteer")
        golden["families"][family] = {
            "model": source, "file": name, "config": config, "size": len(theirs),
            "ids": [[text, theirs(text)["input_ids"]] for text in texts], "pair": pair["input_ids"],
            "segments": theirs("Jim Henson", "a puppeteer", return_token_type_ids=True)["token_type_ids"],
            "special": {role: [getattr(theirs, f"{role}_token"), getattr(theirs, f"{role}_token_id")]
                        for role in ["cls", "sep", "mask", "pad", "unk"] if getattr(theirs, f"{role}_token")},
        }
    shutil.rmtree(out / "families")
    text = json.dumps(golden, separators=(",", ":")) + "\n"
    (out / "golden.json.gz").write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    print(*(f"{path.name}: {path.stat().st_size}" for path in sorted(out.iterdir())), sep="\n")


if __name__ == "__main__":
    task, *rest = sys.argv[1:]
    if task == "train":
        train(Path(rest[0]), Path(rest[1]))
    elif task == "sample":
        sample(Path(rest[0]), Path(rest[1]))
    elif task == "check":
        check(Path(rest[0]), rest[1])
    elif task == "families":
        families(Path(rest[0]), rest[1])
    else:
        sys.exit(__doc__)
