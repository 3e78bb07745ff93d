"""Make tests-data/sentence: what sentence-transformers and transformers' pipelines give on small models.

    HF_HUB_OFFLINE=1 python tools/golden/sentence.py [OUTPUT_DIRECTORY]

The weights are those of tests-data/bert-golden and tests-data/relatives-golden, the tokenizer is tests-data/likelihood/vocab.txt;
here are only the small files that sentence-transformers writes beside a model (embed/CASE/…, with the weights of dense layers)
and golden.json:

- embed: for each case the directory, the weights' directory, the prompt (name or text), texts and vectors. Some directories have
  today's form (as saved), others that of older versions (flags, max_seq_length, 0_Transformer);
- rerank: scores of a CrossEncoder for each form in which files name its activation, and in today's form (modules.json);
- tag: entities under the five aggregation strategies, with WordPiece and with byte-level BPE (tag/tokenizer.json);
- zero_shot: scores of labels.
"""

import json
import os
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
warnings.filterwarnings("ignore")

import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import BertTokenizerFast, PreTrainedTokenizerFast, pipeline

ROOT = Path(__file__).resolve().parents[2]
OUT = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "tests-data/sentence"
TEXTS = [
    "The cat sat on the puppet.",
    "Jim Henson was a puppeteer.",
    "who is the small child, and what was the old man's dog?",
    "cats",
    "The old man and the small child walked with the dog, and the dog ran, and the cat sat, and Jim Henson was singing. "
    "The puppets were new, and the puppeteers were old.",
]
TAGGED = [
    "Jim Henson was a puppeteer.",
    "The dogs walked newly, zebra man's puppets; who's singing?",
    "Henson Jim, the small child and the puppeteers' old dog sat.",
    "  cats  dogs\tplayed!",
]
LABELS = {"id2label": {i: x for i, x in enumerate(["O", "B-PER", "I-PER", "B-LOC", "I-LOC"])}}
LABELS["label2id"] = {x: i for i, x in LABELS["id2label"].items()}


def tokenizer(to, **more):
    made = BertTokenizerFast(str(ROOT / "tests-data/likelihood/vocab.txt"), model_max_length=40, **more)
    made.save_pretrained(to)
    return made


def model(head, to, family="bert-golden", change=None, scale=None):
    """A golden model with a tokenizer."""
    source = ROOT / "tests-data" / family / head
    to.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    config.update(change or {})
    (to / "config.json").write_text(json.dumps(config))
    weights = load_file(source / "model.safetensors")
    save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
    tokenizer(to)
    return to


def dense(inputs, outputs, **more):
    made = Dense(inputs, outputs, **more)
    for number, parameter in enumerate(made.parameters()):
        values = torch.sin(0.7 * torch.arange(parameter.numel()) + 1.3 * number) * 0.4
        parameter.data = values.reshape(parameter.shape).to(torch.float32)
    return made


def embed_cases(base):
    """Name, modules behind the transformer, further arguments of SentenceTransformer, changes of the files, prompt."""
    query = {"prompts": {"query": "who is: ", "document": ""}, "default_prompt_name": "query"}
    return [
        ("mean", [Pooling(24, "mean"), Normalize()], {}, {}),
        ("cls", [Pooling(24, "cls")], {}, {}),
        ("max", [Pooling(24, "max")], {}, {}),
        ("sqrt", [Pooling(24, "mean_sqrt_len_tokens")], {}, {}),
        ("weighted", [Pooling(24, "weightedmean")], {}, {}),
        ("last", [Pooling(24, "lasttoken")], {}, {}),
        ("several", [Pooling(24, ["mean", "cls", "lasttoken"]), Normalize()], {}, {}),
        ("dense", [Pooling(24, "mean"), dense(24, 8), Normalize()], {}, {}),
        ("dense-relu", [Pooling(24, "cls"), Normalize(), dense(24, 5, bias=False, activation_function=torch.nn.ReLU())], {}, {}),
        ("dense-residual", [Pooling(24, "mean"), dense(24, 6, activation_function=None, use_residual=True)], {}, {}),
        ("prompt", [Pooling(24, "mean"), Normalize()], query, {}),
        ("prompt-apart", [Pooling(24, "mean", include_prompt=False), Normalize()], query, {}),
        ("prompt-apart-all", [Pooling(24, list(Pooling.POOLING_MODES), include_prompt=False)], query, {}),
        ("lower", [Pooling(24, "mean")], {}, {"lower": True}),
        ("old", [Pooling(24, "mean"), Normalize()], {}, {"old": True}),
        ("nested", [Pooling(24, "cls"), dense(24, 4)], {}, {"nested": True}),
    ]


OLD_CLASSES = {
    "sentence_transformers.base.modules.transformer.Transformer": "sentence_transformers.models.Transformer",
    "sentence_transformers.sentence_transformer.modules.pooling.Pooling": "sentence_transformers.models.Pooling",
    "sentence_transformers.base.modules.dense.Dense": "sentence_transformers.models.Dense",
    "sentence_transformers.base.modules.normalize.Normalize": "sentence_transformers.models.Normalize",
}


def make_old(saved):
    """The same directory as versions before 5 wrote it."""
    modules = json.loads((saved / "modules.json").read_text())
    for module in modules:
        module["type"] = OLD_CLASSES[module["type"]]
    (saved / "modules.json").write_text(json.dumps(modules))
    config = json.loads((saved / "1_Pooling/config.json").read_text())
    mode = config.pop("pooling_mode")
    config["word_embedding_dimension"] = config.pop("embedding_dimension")
    flags = ["cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken"]
    config.update({f"pooling_mode_{flag}": flag.startswith(mode) and "sqrt" not in flag for flag in flags})
    (saved / "1_Pooling/config.json").write_text(json.dumps(config))
    (saved / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 12, "do_lower_case": False}))


def nest(saved):
    """The encoder in a folder of its own, and a config.json that is none of a model."""
    inner = saved / "0_Transformer"
    inner.mkdir()
    for name in ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "sentence_bert_config.json"]:
        shutil.move(saved / name, inner / name)
    modules = json.loads((saved / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    (saved / "modules.json").write_text(json.dumps(modules))
    (saved / "config.json").write_text(json.dumps({"__version__": "0.2.5"}))


def embed(place):
    cases = []
    for name, modules, more, changes in embed_cases(place):
        base = model("model", place / "base")
        if changes.get("lower"):
            tokenizer(base, do_lower_case=False)
        saved = place / name
        SentenceTransformer(modules=[Transformer(str(base)), *modules], device="cpu", **more).save(str(saved))
        if changes.get("old"):
            make_old(saved)
        if changes.get("lower"):
            config = json.loads((saved / "sentence_bert_config.json").read_text())
            (saved / "sentence_bert_config.json").write_text(json.dumps({**config, "do_lower_case": True}))
        if changes.get("nested"):
            nest(saved)
        st = SentenceTransformer(str(saved), device="cpu")
        prompts = [{}] + ([{"prompt_name": "document"}, {"prompt": "what was the "}] if more else [])
        for prompt in prompts:
            # One at a time: padding changes sums in the last bits.
            vectors = [st.encode(text, **prompt).tolist() for text in TEXTS]
            cases.append({"case": name, **prompt, "vectors": [[round(x, 7) for x in v] for v in vectors]})
        kept = OUT / "embed" / name
        for file in sorted(saved.rglob("*")):
            small = file.suffix == ".json" and file.name != "tokenizer.json" or file.parent.name.endswith("_Dense")
            if file.is_file() and small and file.name != "config.json" or file.parent.name[:2] in ("1_", "2_", "3_"):
                if file.is_file():
                    to = kept / file.relative_to(saved)
                    to.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(file, to)
    return {"texts": TEXTS, "cases": cases}


def rerank(place):
    pairs = [("who is the child?", text) for text in TEXTS]
    cases = []
    identity, sigmoid = "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Sigmoid"
    forms = [
        ("regression", "bert-golden", {}),
        ("regression", "bert-golden", {"sentence_transformers": {"activation_fn": identity, "version": "4.0.1"}}),
        ("regression", "bert-golden", {"sbert_ce_default_activation_function": "torch.nn.modules.activation.Tanh"}),
        ("regression", "bert-golden", {"sentence_transformers": {"activation_fn": sigmoid}, "sbert_ce_default_activation_function": identity}),
    ]
    for number, (head, family, change) in enumerate(forms):
        directory = model(head, place / f"ce{number}", family, change)
        encoder = CrossEncoder(str(directory), device="cpu")
        scores = [float(encoder.predict([pair])[0]) for pair in pairs]
        cases.append({"weights": f"{family}/{head}", "config": change, "files": {}, "scores": scores})
    # As it saves itself today.
    encoder = CrossEncoder(str(place / "ce0"), device="cpu", activation_fn=torch.nn.Tanh())
    encoder.save(str(place / "saved"))
    scores = [float(CrossEncoder(str(place / "saved"), device="cpu").predict([pair])[0]) for pair in pairs]
    names = ["modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"]
    files = {name: json.loads((place / "saved" / name).read_text()) for name in names}
    cases.append({"weights": "bert-golden/regression", "config": {}, "files": files, "scores": scores})
    return {"query": pairs[0][0], "texts": TEXTS, "cases": cases}


def byte_pairs(to):
    made = Tokenizer(models.BPE(unk_token=None))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=71, special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"], show_progress=False)
    made.train_from_iterator(TAGGED, trainer)
    made.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), trim_offsets=True, add_prefix_space=False)
    assert made.get_vocab_size() <= 71, made.get_vocab_size()
    PreTrainedTokenizerFast(
        tokenizer_object=made, model_max_length=40, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>",
        mask_token="<mask>", cls_token="<s>", sep_token="</s>",
    ).save_pretrained(to)


def tag(place):
    cases = []
    for kind, name in [("wordpiece", "wp"), ("byte-pairs", "bp")]:
        directory = model("token", place / name, change={**LABELS, "id2label": {str(k): v for k, v in LABELS["id2label"].items()}})
        if name == "bp":
            for file in directory.glob("tokenizer*"):
                file.unlink()
            byte_pairs(directory)
            (OUT / "tag").mkdir(parents=True, exist_ok=True)
            for file in ["tokenizer.json", "tokenizer_config.json"]:
                shutil.copyfile(directory / file, OUT / "tag" / file)
        for strategy in ["none", "simple", "first", "average", "max"]:
            made = pipeline("token-classification", model=str(directory), aggregation_strategy=strategy, device="cpu")
            for text in TAGGED:
                found = made(text)
                groups = [[e.get("entity_group", e.get("entity")), float(e["score"]), e["start"], e["end"]] for e in found]
                cases.append({"tokenizer": kind, "strategy": strategy, "text": text, "groups": groups})
    return {"labels": LABELS["id2label"], "cases": cases}


def zero_shot(place):
    cases = []
    labels = ["puppet", "dog", "old man"]
    for order in [["contradiction", "neutral", "entailment"], ["ENTAILMENT", "NEUTRAL", "CONTRADICTION"]]:
        names = {"id2label": {str(i): x for i, x in enumerate(order)}, "label2id": {x: i for i, x in enumerate(order)}}
        directory = model("sequence", place / order[0], change=names)
        made = pipeline("zero-shot-classification", model=str(directory), device="cpu")
        for multi_label in [False, True]:
            for template in ["This example is {}.", "the {} was not old"]:
                for some in [labels, labels[:1]]:
                    for text in TEXTS:
                        found = made(text, some, hypothesis_template=template, multi_label=multi_label)
                        scores = dict(zip(found["labels"], found["scores"]))
                        scores = [scores[label] for label in some]
                        case = {"order": order, "multi_label": multi_label, "hypothesis": template, "labels": some}
                        cases.append({**case, "text": text, "scores": scores})
    return cases


def main():
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    golden = {}
    for make in [embed, rerank, tag, zero_shot]:
        with tempfile.TemporaryDirectory() as place:
            golden[make.__name__] = make(Path(place))
    (OUT / "golden.json").write_text(json.dumps(golden, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
