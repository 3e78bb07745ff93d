"""Make tests-data/writers-golden: models that write, under every head, with transformers' own numbers.

    HF_HUB_OFFLINE=1 python tools/golden/make_writers_golden.py [OUTPUT_DIR [FAMILY...]]

One directory per family and head, with the files that make_bert_golden.py makes for BERT; README.md beside this script says
what each tensor is. Sequences run one by one, so that nothing is padded, and losses are means over all of their predictions;
that they are transformers' own is asserted for each sequence alone.
"""

import copy
import json
import shutil
import sys
from pathlib import Path

import make_bert_golden as golden
import torch
import transformers
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy

VOCAB, END = 41, 2
LENGTHS, TARGET_LENGTHS = [7, 14, 1, 20], [5, 1, 11, 3]
CHOICE_LENGTHS = [5, 13, 9, 6, 2, 11]  # 2 examples of 3 choices
# The share of the language model's loss in a head for choices, as Radford et al. (2018) have it.
LM_SHARE = 0.5
HEADS = {
    "model": ("Model", {}),
    "lm": ("LMHeadModel", {}),
    "seq2seq": ("ForConditionalGeneration", {}),
    "sequence": ("ForSequenceClassification", {"num_labels": 3}),
    "token": ("ForTokenClassification", {"num_labels": 5}),
    "qa": ("ForQuestionAnswering", {}),
    "choice": ("DoubleHeadsModel", {"num_labels": 1}),
}
GPT = {
    "vocab_size": VOCAB, "n_positions": 24, "n_embd": 8, "n_layer": 2, "n_head": 2,
    "bos_token_id": 1, "eos_token_id": END, "pad_token_id": 0,
}
T5 = {
    "vocab_size": VOCAB, "d_model": 8, "d_kv": 6, "d_ff": 12, "num_layers": 2, "num_heads": 2,
    # Few, so that the sequences use all of them.
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12,
    "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": END,
}
BART = {
    "vocab_size": VOCAB, "d_model": 8, "encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 12, "decoder_ffn_dim": 16, "max_position_embeddings": 24,
    "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": END, "decoder_start_token_id": END,
}
MARIAN = BART | {
    "decoder_vocab_size": VOCAB, "eos_token_id": 0, "bos_token_id": None, "pad_token_id": VOCAB - 1,
    "decoder_start_token_id": VOCAB - 1, "forced_eos_token_id": 0, "scale_embedding": True, "activation_function": "swish",
}
# family: (how its classes begin, its settings, its heads)
FAMILIES = {
    "gpt2": ("GPT2", GPT, ["model", "lm", "sequence", "token", "qa", "choice"]),
    "gpt2-scaled": (
        "GPT2",
        GPT | {"n_inner": 12, "scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True, "activation_function": "relu"},
        ["lm"],
    ),
    "openai-gpt": ("OpenAIGPT", GPT, ["model", "lm", "sequence", "choice"]),
    "t5": ("T5", T5, ["model", "seq2seq", "sequence", "token", "qa"]),
    "t5-v1_1": ("T5", T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}, ["seq2seq", "sequence"]),
    "bart": ("Bart", BART, ["model", "seq2seq", "sequence", "qa"]),
    "bart-scaled": ("Bart", BART | {"scale_embedding": True, "activation_function": "relu"}, ["seq2seq"]),
    "marian": ("Marian", MARIAN, ["model", "seq2seq"]),
}


def class_of(prefix, head):
    own = {("T5", "model"): "T5EncoderModel", ("Marian", "seq2seq"): "MarianMTModel"}
    return getattr(transformers, own.get((prefix, head), f"{prefix}{HEADS[head][0]}"))


def make_model(prefix, settings, head):
    """Weights far from the usual start; equal names get equal weights."""
    config = getattr(transformers, f"{prefix}Config")(**settings, **HEADS[head][1], attn_implementation="eager")
    model = class_of(prefix, head)(config).eval()
    if settings.get("tie_word_embeddings") is False and head == "seq2seq":
        model.lm_head.weight = torch.nn.Parameter(torch.empty(VOCAB, settings["d_model"]))
    for module in model.modules():
        # transformers gives the padding's row no gradient where it is looked up; a start token may be the same row.
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_positions" in name and not parameter.requires_grad:
                continue
            short = name.removeprefix("transformer.").removeprefix("model.")
            draw = torch.randn(parameter.shape, generator=golden.generator(short))
            is_norm = parameter.dim() == 1 and name.endswith("weight")
            parameter.copy_(1 + 0.2 * draw if is_norm else (0.1 if name.endswith("bias") else 0.3) * draw)
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_(0, 0.1, generator=golden.generator("final_logits_bias"))
    return model


def make_input(head, settings):
    """Flat inputs and labels, as stored under `input.`. Every sequence ends with the end token and has no other."""
    rng = golden.generator("input")
    lengths = CHOICE_LENGTHS if head == "choice" else LENGTHS
    end = settings["eos_token_id"]

    def texts(lengths):
        # Ids that are special to no family.
        parts = [torch.cat([torch.randint(3, VOCAB - 1, (n - 1,), generator=rng), torch.tensor([end])]) for n in lengths]
        return torch.cat(parts), torch.tensor([0, *lengths]).cumsum(0)

    data = {}
    data["ids"], data["offsets"] = texts(lengths)
    data["segments"] = torch.zeros_like(data["ids"])
    if head == "seq2seq":
        data["target_ids"], data["target_offsets"] = texts(TARGET_LENGTHS)
    if head in ("lm", "choice"):
        ends = set((data["offsets"][1:] - 1).tolist())
        data["rows"] = torch.tensor([row for row in range(sum(lengths)) if row not in ends])
        data["targets"] = data["ids"][data["rows"] + 1]
    total = sum(lengths)
    if head == "sequence":
        data["labels"] = torch.tensor([2, 0, 1, 1])
    elif head == "token":
        labels = torch.randint(0, 5, (total,), generator=rng)
        data["labels"] = torch.where(torch.rand(total, generator=rng) < 0.3, -100, labels)
    elif head == "choice":
        data["labels"] = torch.tensor([2, 0])
    elif head == "qa":
        data["start"], data["end"] = torch.tensor([2, 10, 0, 7]), torch.tensor([5, 12, 0, 15])
    return data


def parts(flat, offsets):
    return [flat[a:b] for a, b in zip(offsets[:-1].tolist(), offsets[1:].tolist())]


def same(a, b):
    """Some of transformers' losses are f32 always."""
    return torch.allclose(a.float(), b.float())


def run(model, head, data, i):
    """What one sequence gives, with the loss that transformers has for it alone."""
    ids = parts(data["ids"], data["offsets"])[i][None]
    call = {"input_ids": ids}
    if head == "seq2seq":
        call["labels"] = parts(data["target_ids"], data["target_offsets"])[i][None]
    elif head == "token":
        call["labels"] = parts(data["labels"], data["offsets"])[i][None]
    elif head == "sequence":
        call["labels"] = data["labels"][i : i + 1]
    elif head == "qa":
        call["start_positions"], call["end_positions"] = data["start"][i : i + 1], data["end"][i : i + 1]
    elif head == "lm" and ids.shape[1] > 1:
        call["labels"] = ids
    elif head == "choice":
        call = {"input_ids": ids[None], "mc_token_ids": torch.tensor([[ids.shape[1] - 1]]), "labels": ids[None]}
    elif head == "model" and model.config.model_type == "marian":
        call["decoder_input_ids"] = ids  # of no use: what counts is the encoder
    return model(**call, output_hidden_states=True, output_attentions=True)


def forward(model, head, data):
    """All sequences; returns (loss, flat outputs)."""
    results = [run(model, head, data, i) for i in range(len(data["offsets"]) - 1)]

    # Marian alone has no default for what its decoder reads without a target.
    of = "decoder_" if results[0].get("decoder_hidden_states") else ""
    if head == "model" and model.config.model_type == "marian":
        of = "encoder_"

    def states(result):
        found = result.get(f"{of}hidden_states")
        return [state.reshape(-1, state.shape[-1]) for state in found]

    out = {f"hidden.{i}": torch.cat(layer) for i, layer in enumerate(zip(*map(states, results)))}
    logits = lambda name="logits": torch.cat([result[name].reshape(-1, result[name].shape[-1]) for result in results])
    if head == "model":
        for i, result in enumerate(results):
            for layer, maps in enumerate(result.get(f"{of}attentions")):
                out[f"attention.{layer}.{i}"] = maps[0]
        loss = out[f"hidden.{len(states(results[0])) - 1}"].square().mean()
    elif head == "seq2seq":
        out["logits"] = logits()
        loss = cross_entropy(out["logits"], data["target_ids"])
        for result, target in zip(results, parts(data["target_ids"], data["target_offsets"])):
            assert same(result.loss, cross_entropy(result.logits[0], target))
    elif head == "lm":
        out["logits"] = logits()[data["rows"]]
        loss = cross_entropy(out["logits"], data["targets"])
        for result, ids in zip(results, parts(data["ids"], data["offsets"])):
            assert len(ids) == 1 or same(result.loss, cross_entropy(result.logits[0, :-1], ids[1:]))
    elif head == "choice":
        out["vocabulary_logits"] = logits()[data["rows"]]
        out["logits"] = torch.cat([result.mc_logits.reshape(1) for result in results]).view(-1, golden.CHOICES)
        out["lm_loss"] = cross_entropy(out["vocabulary_logits"], data["targets"]).reshape(1)
        loss = cross_entropy(out["logits"], data["labels"]) + LM_SHARE * out["lm_loss"][0]
    elif head == "qa":
        start, end = [torch.stack([cross_entropy(result[f"{side}_logits"], data[side][i : i + 1])
                                   for i, result in enumerate(results)]) for side in ("start", "end")]
        assert all(same(result.loss, (a + b) / 2) for result, a, b in zip(results, start, end))
        sides = [torch.cat([result[f"{side}_logits"][0] for result in results]) for side in ("start", "end")]
        out["logits"] = torch.stack(sides, dim=1)
        loss = (start.mean() + end.mean()) / 2
    else:
        out["logits"] = logits()
        loss = cross_entropy(out["logits"], data["labels"])
        if head == "sequence":
            assert same(torch.stack([result.loss for result in results]).mean(), loss)
    out["loss"] = loss.reshape(1)
    return loss, out


def make_head(prefix, settings, head, directory):
    model = make_model(prefix, settings, head)
    model.save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    data = make_input(head, settings)
    golden.forward = forward
    double = copy.deepcopy(model).double()  # the same in f64: says how far to trust the f32 values
    values, exact = golden.numbers(model, head, data), golden.numbers(double, head, data)
    frozen = {f"grad.{name}" for name, parameter in model.named_parameters() if not parameter.requires_grad}
    values = {name: value for name, value in values.items() if name not in frozen}
    noise = {}
    for name, value in values.items():
        assert value.isfinite().all(), name
        kind = ".".join(name.split(".")[:2]) if name.startswith(("output", "steps")) else "grad"
        noise[kind] = max(noise.get(kind, 0.0), float((value.double() - exact[name]).abs().max()))
    about = {
        "head": head,
        "class": type(model).__name__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "optimizer": "AdamW lr 1e-3 betas 0.9 0.999 eps 1e-6, weight decay 0.01 except vectors, "
        "clip_grad_norm_ 1.0, constant lr, no dropout",
        "max_abs_difference_from_f64": {kind: float(f"{value:.2g}") for kind, value in noise.items()},
    }
    values |= {f"input.{name}": value for name, value in data.items()}
    save_file(values, directory / "golden.safetensors", metadata={"about": json.dumps(about)})
    print(directory.parent.name, head, json.dumps(about["max_abs_difference_from_f64"]))


def main():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    only = sys.argv[2:]
    default = Path(__file__).resolve().parents[2] / "tests-data" / "writers-golden"
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else default
    for family, (prefix, settings, heads) in FAMILIES.items():
        if only and family not in only:
            continue
        shutil.rmtree(root / family, ignore_errors=True)
        for head in heads:
            make_head(prefix, settings, head, root / family / head)


if __name__ == "__main__":
    main()
