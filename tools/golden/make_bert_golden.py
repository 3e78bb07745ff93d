"""Make tests-data/bert-golden: a tiny BERT under every head, with transformers' own numbers.

    HF_HUB_OFFLINE=1 python tools/golden/make_bert_golden.py [OUTPUT_DIR]

Per head one directory: config.json and model.safetensors (from save_pretrained), and
golden.safetensors with inputs, outputs, gradients and ten training steps. README.md beside this
script says what each tensor is. Everything is drawn from fixed seeds; on one machine with the
same versions a second run writes the same bytes.
"""

import copy
import json
import math
import os
import shutil
import sys
import zlib
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy

VOCAB, HIDDEN, LAYERS, HEADS = 71, 24, 2, 3
LENGTHS = [7, 33, 1, 12, 20]
CHOICE_LENGTHS = [5, 17, 9, 26, 2, 13]  # 2 examples of 3 choices
CHOICES = 3
OUTSIDE = 99  # an answer position past every sequence: its term is left out of the loss
STEPS = 10

# head: (class, settings over the common ones)
MODELS = {
    "model": (transformers.BertModel, {}),
    "pretraining": (transformers.BertForPreTraining, {}),
    "mlm": (transformers.BertForMaskedLM, {}),
    "sequence": (transformers.BertForSequenceClassification, {"num_labels": 3}),
    "regression": (transformers.BertForSequenceClassification, {"num_labels": 1, "problem_type": "regression"}),
    "multilabel": (
        transformers.BertForSequenceClassification,
        {"num_labels": 4, "problem_type": "multi_label_classification"},
    ),
    "token": (transformers.BertForTokenClassification, {"num_labels": 5}),
    "qa": (transformers.BertForQuestionAnswering, {}),
    "choice": (transformers.BertForMultipleChoice, {}),
    "pretraining-gelu-new": (transformers.BertForPreTraining, {"hidden_act": "gelu_new"}),
}


def generator(name):
    """A random generator that depends on the name alone."""
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))


def make_model(head):
    """The head's model with weights far from the usual start; equal names get equal weights."""
    kind, settings = MODELS[head]
    config = transformers.BertConfig(
        **{
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "intermediate_size": 48,
            "max_position_embeddings": 40,
            "type_vocab_size": 2,
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-12,
            "pad_token_id": 0,
            **settings,
        },
        attn_implementation="eager",
    )
    assert config.hidden_dropout_prob == config.attention_probs_dropout_prob == 0.1
    model = kind(config).eval()  # eval: no dropout anywhere below
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            draw = torch.randn(parameter.shape, generator=generator(name.removeprefix("bert.")))
            if name.endswith("LayerNorm.weight"):
                parameter.copy_(1 + 0.2 * draw)
            else:
                parameter.copy_((0.1 if name.endswith("bias") else 0.2) * draw)
    return model


# Heads with a label for each token.
PER_TOKEN = ("token", "discriminator")


def make_input(head):
    """The flat (padding removed) inputs and labels of a head, as stored under `input.`."""
    rng = generator("input")
    lengths = CHOICE_LENGTHS if head == "choice" else LENGTHS
    total, batch = sum(lengths), len(lengths)
    ints = lambda low, high, *shape: torch.randint(low, high, shape, generator=rng)
    # Ids start at 1: transformers gives the embedding row of the pad id (0) no lookup gradient.
    data = {"ids": ints(1, VOCAB, total), "offsets": torch.tensor([0, *lengths]).cumsum(0)}
    first = [int(ints(1, length + 1, 1)) for length in lengths]
    data["segments"] = torch.cat([(torch.arange(n) >= k).long() for n, k in zip(lengths, first)])
    if head.startswith("pretraining") or head == "mlm":
        data["rows"] = torch.randperm(total, generator=rng)[: total // 5].sort().values
        data["targets"] = ints(0, VOCAB, len(data["rows"]))
    if head.startswith("pretraining"):
        data["nsp"] = torch.tensor([0, 1, 1, 0, 1])
    elif head == "sequence":
        data["labels"] = torch.tensor([2, 0, 1, 1, 2])
    elif head == "regression":
        data["labels"] = torch.randn(batch, generator=rng)
    elif head == "multilabel":
        data["labels"] = ints(0, 2, batch, 4).float()
    elif head == "token":
        labels = ints(0, 5, total)
        data["labels"] = torch.where(torch.rand(total, generator=rng) < 0.3, -100, labels)
    elif head == "discriminator":
        data["labels"] = (torch.rand(total, generator=rng) < 0.3).float()
    elif head == "choice":
        data["labels"] = torch.tensor([2, 0])
    elif head == "qa":
        data["start"] = torch.tensor([2, 30, 0, OUTSIDE, 7])
        data["end"] = torch.tensor([5, 32, 0, 4, 15])
    return data


def pad(flat, offsets, fill):
    """[T, ...] to [B, S, ...], `fill` in the padding."""
    parts = [flat[a:b] for a, b in zip(offsets[:-1], offsets[1:])]
    return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=fill)


def forward(model, head, data):
    """Run the padded batch; returns (loss, flat outputs)."""
    offsets = data["offsets"].tolist()
    real = pad(torch.ones_like(data["ids"]), offsets, 0)
    call = {"input_ids": pad(data["ids"], offsets, model.config.pad_token_id), "attention_mask": real}
    if getattr(model.config, "type_vocab_size", 0) > 1:
        call["token_type_ids"] = pad(data["segments"], offsets, 0)
    if head == "choice":
        call = {key: value.view(-1, CHOICES, value.shape[1]) for key, value in call.items()}
    number = next(model.parameters()).dtype
    if "labels" in data:
        labels = data["labels"]
        labels = labels.to(number) if labels.is_floating_point() else labels
        call["labels"] = pad(labels, offsets, -100) if head in PER_TOKEN else labels
    elif "rows" in data:
        flat = torch.full_like(data["ids"], -100).scatter(0, data["rows"], data["targets"])
        call["labels"] = pad(flat, offsets, -100)
    if "nsp" in data:
        order = "sentence_order_label" if model.base_model_prefix == "albert" else "next_sentence_label"
        call[order] = data["nsp"]
    if "start" in data:
        call["start_positions"], call["end_positions"] = data["start"], data["end"]

    pooled = []
    pooler = getattr(getattr(model, model.base_model_prefix, model), "pooler", None)
    # ALBERT's pooler is the dense layer alone.
    last = torch.tanh if isinstance(pooler, torch.nn.Linear) else torch.nn.Identity()
    hook = pooler.register_forward_hook(lambda *a: pooled.append(last(a[2]))) if pooler else None
    result = model(**call, output_hidden_states=True, output_attentions=True)
    if hook:
        hook.remove()

    real = real.bool()
    out = {f"hidden.{i}": state[real] for i, state in enumerate(result.hidden_states)}
    assert len(out) == LAYERS + 1
    if pooled:
        out["pooled"] = pooled[0]
    loss = result.get("loss")
    if head == "model":
        for layer, weights in enumerate(result.attentions):
            for i, n in enumerate(real.sum(1).tolist()):
                out[f"attention.{layer}.{i}"] = weights[i, :, :n, :n]
        loss = out[f"hidden.{LAYERS}"].square().mean()
        if pooled:
            loss = loss + out["pooled"].mean()
    elif "rows" in data:
        logits = result.logits if head == "mlm" else result.prediction_logits
        out["logits"] = logits[real][data["rows"]]
        if "nsp" in data:
            out["nsp_logits"] = result.get("seq_relationship_logits", result.get("sop_logits"))
            out["mlm_loss"] = cross_entropy(out["logits"], data["targets"]).reshape(1)
            out["nsp_loss"] = cross_entropy(out["nsp_logits"], data["nsp"]).reshape(1)
    elif head == "qa":
        out["logits"] = torch.stack([result.start_logits[real], result.end_logits[real]], dim=1)
        out["padded_loss"] = loss.reshape(1)
        loss = qa_loss(result, real, data)
    else:
        out["logits"] = result.logits[real] if head in PER_TOKEN else result.logits
    out["loss"] = loss.reshape(1)
    return loss, out


def qa_loss(result, real, data):
    """What transformers computes when no sequence is padded.

    Its own loss over a padded batch takes the softmax over the padding as well, so it depends on
    how far the batch was padded; here the padding is left out.
    """
    total = 0
    for logits, at in [(result.start_logits, data["start"]), (result.end_logits, data["end"])]:
        at = at.clamp(min=0)
        at = torch.where(at < real.sum(1), at, -100)
        total = total + cross_entropy(logits.masked_fill(~real, -torch.inf), at)
    return total / 2


def check_qa_loss(model, data):
    """qa_loss is transformers' loss: one sequence at a time, no padding, averaged."""
    terms = {"start": [], "end": []}
    for i, (a, b) in enumerate(zip(data["offsets"][:-1], data["offsets"][1:])):
        start, end = data["start"][i : i + 1], data["end"][i : i + 1]
        segments = {"token_type_ids": data["segments"][None, a:b]} if getattr(model.config, "type_vocab_size", 0) > 1 else {}
        result = model(input_ids=data["ids"][None, a:b], **segments, start_positions=start, end_positions=end)
        inside = [side for side, at in [("start", start), ("end", end)] if at < b - a]
        for side in inside:
            terms[side].append(cross_entropy(result[f"{side}_logits"], data[side][i : i + 1]))
        if len(inside) == 2:
            assert torch.allclose(result.loss, (terms["start"][-1] + terms["end"][-1]) / 2)
    mean = sum(torch.stack(values).mean() for values in terms.values()) / 2
    assert torch.allclose(mean, forward(model, "qa", data)[0])


def train(model, head, data):
    """Ten AdamW steps on the same batch: losses before each update, gradient norms, weights after."""
    named = list(model.named_parameters())
    groups = [
        {"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.01},
        {"params": [p for _, p in named if p.dim() == 1], "weight_decay": 0.0},  # biases and LayerNorm
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.999), eps=1e-6)
    losses, norms = [], []
    for _ in range(STEPS):
        loss, _ = forward(model, head, data)
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        losses.append(loss.detach())
    out = {"steps.losses": torch.stack(losses), "steps.grad_norms": torch.stack(norms)}
    if head == "pretraining":
        out |= {f"steps.final.{n}": p for n, p in named}
    return out


def numbers(model, head, data):
    """Everything computed for a head, at the precision of `model`."""
    loss, outputs = forward(model, head, data)
    loss.backward()
    tensors = {f"output.{name}": value for name, value in outputs.items()}
    for name, parameter in model.named_parameters():
        # A parameter the loss does not reach has no gradient in torch: zeros here.
        grad = parameter.grad
        tensors[f"grad.{name}"] = torch.zeros_like(parameter) if grad is None else grad.clone()
    tensors |= train(model, head, data)
    return {name: value.detach().contiguous().clone() for name, value in tensors.items()}


def make_head(head, directory):
    model = make_model(head)
    model.save_pretrained(directory)
    data = make_input(head)
    if head == "qa":
        check_qa_loss(model, data)
    double = copy.deepcopy(model).double()  # the same in f64: says how far to trust the f32 values
    values, exact = numbers(model, head, data), numbers(double, head, data)
    noise = {}
    for name, value in values.items():
        assert value.isfinite().all(), name
        kind = ".".join(name.split(".")[:2]) if name.startswith(("output", "steps")) else "grad"
        difference = float((value.double() - exact[name]).abs().max())
        # ModernBERT's eager attention has NaN where a padded row sees nothing in f64: then nothing is said.
        noise[kind] = max(noise.get(kind, 0.0), difference) if difference == difference else math.inf
    about = {
        "head": head,
        "class": type(model).__name__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "loss": {
            "model": "mean(last hidden squared), over real tokens, + mean(pooled) where there is a pooler",
            "qa": "transformers' loss of unpadded sequences; output.padded_loss is that of the padded batch",
        }.get(head, "transformers' own"),
        "optimizer": "AdamW lr 1e-3 betas 0.9 0.999 eps 1e-6, weight decay 0.01 except names with "
        "LayerNorm or bias, clip_grad_norm_ 1.0, constant lr, no dropout",
        "max_abs_difference_from_f64": {kind: float(f"{value:.2g}") for kind, value in noise.items() if value < math.inf},
    }
    values |= {f"input.{name}": value for name, value in data.items()}
    # One metadata key: safetensors writes several in no fixed order.
    save_file(values, directory / "golden.safetensors", metadata={"about": json.dumps(about)})
    print(head, json.dumps(about["max_abs_difference_from_f64"]))


def make_variants(directory):
    """The pretraining weights as other files in the wild hold them; each is loaded back here."""
    model = make_model("pretraining")
    kind = type(model)

    model.bert.save_pretrained(directory / "no-prefix")
    model.save_pretrained(directory / "sharded", max_shard_size="30KB")
    for name, dtype in [("f16", torch.float16), ("bf16", torch.bfloat16)]:
        copy.deepcopy(model).to(dtype).save_pretrained(directory / name)

    model.save_pretrained(directory / "old-names")
    file = directory / "old-names" / "model.safetensors"
    weights = load_file(file)
    old = lambda n: n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
    save_file({old(name): value for name, value in weights.items()}, file, metadata={"format": "pt"})

    # Older transformers also wrote the tied decoder and the position numbers.
    model.save_pretrained(directory / "tied-copies")
    extra = {
        "bert.embeddings.position_ids": torch.arange(model.config.max_position_embeddings)[None],
        "cls.predictions.decoder.weight": weights["bert.embeddings.word_embeddings.weight"].clone(),
        "cls.predictions.decoder.bias": weights["cls.predictions.bias"].clone(),
    }
    save_file(weights | extra, directory / "tied-copies" / "model.safetensors", metadata={"format": "pt"})

    for variant in ["old-names", "sharded", "tied-copies", "f16", "bf16"]:
        loaded, info = kind.from_pretrained(directory / variant, dtype=torch.float32, output_loading_info=True)
        assert not info["missing_keys"] and not info["mismatched_keys"], (variant, info)
        for name, value in loaded.named_parameters():
            tolerance = {"f16": 1e-3, "bf16": 1e-2}.get(variant, 0)
            assert torch.allclose(value, model.get_parameter(name), rtol=tolerance, atol=tolerance), (variant, name)


def main():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    default = Path(__file__).resolve().parents[2] / "tests-data" / "bert-golden"
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else default
    for name in [*MODELS, "variants"]:  # only what this script makes
        shutil.rmtree(root / name, ignore_errors=True)
    for head in MODELS:
        make_head(head, root / head)
    make_variants(root / "variants")


if __name__ == "__main__":
    main()
