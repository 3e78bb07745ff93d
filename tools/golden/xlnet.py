"""Make tests-data/relatives-golden/xlnet: a tiny XLNet under every head, with transformers' own numbers.

    HF_HUB_OFFLINE=1 python tools/golden/xlnet.py [OUTPUT_DIR]

The same files as make_bert_golden.py makes for BERT. Sequences run one at a time, since transformers' heads read the
last column of a padded batch. Vectors, and what transformers calls a bias, have no weight decay.

`permutation` is pre-training: tokens of each sequence are predicted in an order (perm_mask, target_mapping), behind a
memory of earlier tokens, with segments. `input.orders` has 0 for tokens that all see, `input.targets` the places of
what is predicted, `input.target_offsets` where those of a sequence begin, `input.labels` the tokens themselves;
`input.memory.LAYER` are states of earlier tokens, `input.memory_offsets` where those of a sequence begin.

`beams` is XLNetForQuestionAnswering: `input.shown` is from where to where a sequence shows the passage, its last token is
the classification token, and `input.start` and `input.end` are that token where there is no answer. `output.start_logits`
and `output.end_logits` are those of the tokens that are not masked (p_mask), in order; ends and
`output.no_answer_logits` follow from the right start. `output.beams.*` is what the model predicts: for each of the
best starts the best ends (transformers gives these with ends before starts, and calls probabilities log_probs).
"""

import shutil
import sys
from pathlib import Path

import make_bert_golden as golden
import torch
import transformers
from torch.nn.functional import cross_entropy

golden.VOCAB, golden.HIDDEN, golden.HEADS = 31, 12, 2
golden.LENGTHS = [7, 21, 1, 12, 9]
golden.CHOICE_LENGTHS = [5, 11, 9, 14, 2, 7]
SETTINGS = {
    "vocab_size": golden.VOCAB,
    "d_model": golden.HIDDEN,
    "n_layer": golden.LAYERS,
    "n_head": golden.HEADS,
    "d_inner": 20,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "clamp_len": 6,  # fewer than the golden sequences have
    "mem_len": 8,
}
# head: (class, settings)
HEADS = {
    "model": ("XLNetModel", {}),
    "mlm": ("XLNetLMHeadModel", {}),
    "sequence": ("XLNetForSequenceClassification", {"num_labels": 3}),
    "token": ("XLNetForTokenClassification", {"num_labels": 5}),
    "qa": ("XLNetForQuestionAnsweringSimple", {}),
    "choice": ("XLNetForMultipleChoice", {}),
    "permutation": ("XLNetLMHeadModel", {}),
    "beams": ("XLNetForQuestionAnswering", {"start_n_top": 3, "end_n_top": 2}),
}
LENGTHS = list(golden.LENGTHS)
# Each has more tokens to point at than there are beams.
BEAM_LENGTHS = [8, 21, 9, 12, 10]
MEMORY = [5, 0, 3, 8, 1]


class Exact(transformers.XLNetModel):
    """Its table of distances stays in f32, which two streams in f64 do not take."""

    def relative_positional_encoding(self, *sizes, **more):
        return super().relative_positional_encoding(*sizes, **more).to(self.dtype)


def make_model(head):
    name, more = HEADS[head]
    # Without clamping in pre-training, so that both are seen.
    own = {"clamp_len": -1} if head == "permutation" else {}
    model = getattr(transformers, name)(transformers.XLNetConfig(**SETTINGS | more | own)).eval()
    if head == "permutation":
        model.transformer.__class__ = Exact
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            draw = torch.randn(parameter.shape, generator=golden.generator(name.removeprefix("transformer.")))
            if name.lower().endswith(("layer_norm.weight", "layernorm.weight")):
                parameter.copy_(1 + 0.2 * draw)
            else:
                parameter.copy_((0.1 if name.endswith("bias") and "_bias" not in name else 0.3) * draw)
    return model


def make_input(head, original=golden.make_input):
    golden.LENGTHS = BEAM_LENGTHS if head == "beams" else LENGTHS
    data = original(head)
    ends = data["offsets"][1:] - 1
    data["segments"][ends] = 2  # the classification token
    if head == "qa":
        data["start"], data["end"] = torch.tensor([2, 20, 0, golden.OUTSIDE, 7]), torch.tensor([5, 20, 0, 4, 8])
    if head == "beams":
        # The passage is followed by a separator and the classification token.
        lengths = torch.tensor(BEAM_LENGTHS)
        data["shown"] = torch.stack([torch.tensor([2, 5, 1, 4, 3]), lengths - 2], dim=1)
        last = lengths - 1
        data["start"] = torch.tensor([3, 5, last[2], 6, last[4]])
        data["end"] = torch.tensor([5, 18, last[2], 6, last[4]])
    if head == "permutation":
        rng = golden.generator("permutation")
        orders, targets, counts, labels = [], [], [], []
        for length in golden.LENGTHS:
            order = torch.randperm(length, generator=rng) + 1
            # A third is predicted or hidden; of a single token nothing is, since it would see none.
            hidden = torch.randperm(length, generator=rng)[: length // 3]
            orders.append(torch.zeros(length, dtype=torch.long).scatter(0, hidden, order[hidden]))
            # One of them is hidden without being predicted, as special tokens are.
            predicted = hidden[1:] if length > 8 else hidden
            targets.append(predicted)
            counts.append(len(predicted))
        data["orders"], data["targets"] = torch.cat(orders), torch.cat(targets)
        data["target_offsets"] = torch.tensor([0, *counts]).cumsum(0)
        data["labels"] = torch.randint(1, golden.VOCAB, (sum(counts),), generator=rng)
        data["memory_offsets"] = torch.tensor([0, *MEMORY]).cumsum(0)
        for layer in range(golden.LAYERS):
            data[f"memory.{layer}"] = torch.randn(sum(MEMORY), golden.HIDDEN, generator=rng)
    return data


def spans(offsets):
    return list(zip(offsets[:-1].tolist(), offsets[1:].tolist()))


def permutation_call(model, data, i, length):
    """perm_mask, target_mapping and memory of a sequence."""
    a, b = spans(data["offsets"])[i]
    orders = data["orders"][a:b]
    # A token of order 0 sees those of order 0; another one, those of lower orders.
    hidden = (orders[None, :] >= orders.clamp(min=1)[:, None]).to(model.dtype)
    a, b = spans(data["target_offsets"])[i]
    targets = data["targets"][a:b]
    mapping = torch.zeros(1, len(targets), length, dtype=model.dtype)
    mapping[0, torch.arange(len(targets)), targets] = 1
    a, b = spans(data["memory_offsets"])[i]
    memory = [data[f"memory.{layer}"][a:b, None].to(model.dtype) for layer in range(golden.LAYERS)]
    return {"perm_mask": hidden[None], "target_mapping": mapping} | ({"mems": memory} if b > a else {})


def beams(model, data):
    """XLNetForQuestionAnswering, every sequence alone."""
    losses, outputs = [], []
    for i, (a, b) in enumerate(spans(data["offsets"])):
        first, end = data["shown"][i].tolist()
        masked = torch.ones(1, b - a, dtype=model.dtype)
        masked[0, first:end] = masked[0, -1] = 0
        call = {"input_ids": data["ids"][None, a:b], "token_type_ids": data["segments"][None, a:b], "p_mask": masked}
        call |= {"cls_index": torch.tensor([b - a - 1]), "use_mems": False}
        start, impossible = data["start"][i : i + 1], (data["start"][i : i + 1] == b - a - 1).to(model.dtype)
        losses.append(
            model(**call, start_positions=start, end_positions=data["end"][i : i + 1], is_impossible=impossible).loss
        )
        with torch.no_grad():
            result = model(**call, output_hidden_states=True)
            last, open = result.hidden_states[-1], masked[0] == 0
            k, n = model.config.start_n_top, model.config.end_n_top
            out = {f"hidden.{layer}": state[0] for layer, state in enumerate(result.hidden_states)}
            out["start_logits"] = model.start_logits(last)[0][open]
            out["end_logits"] = model.end_logits(last, start_positions=start)[0][open]
            out["no_answer_logits"] = model.answer_class(last, start_positions=start, cls_index=call["cls_index"])
            out["beams.start_probabilities"] = result.start_top_log_probs
            out["beams.starts"] = result.start_top_index
            out["beams.end_probabilities"] = result.end_top_log_probs.view(n, k).T[None]
            out["beams.ends"] = result.end_top_index.view(n, k).T[None]
            out["beams.no_answer"] = result.cls_logits
        outputs.append(out)
    loss = torch.stack(losses).mean()
    return loss, {name: torch.cat([out[name] for out in outputs]) for name in outputs[0]} | {"loss": loss.reshape(1)}


def forward(model, head, data):
    """Every sequence alone; returns (loss, flat outputs)."""
    if head == "beams":
        return beams(model, data)
    states, attentions, logits = [], [], []
    for i, (a, b) in enumerate(spans(data["offsets"])):
        call = {"input_ids": data["ids"][None, a:b], "token_type_ids": data["segments"][None, a:b]}
        if head == "choice":
            call = {key: value[:, None] for key, value in call.items()}
        if head == "permutation":
            call |= permutation_call(model, data, i, b - a)
            if call["target_mapping"].shape[1] == 0:
                continue
        result = model(**call, output_hidden_states=True, output_attentions=True, use_mems=head == "permutation")
        if head != "permutation":
            states.append([state[0] for state in result.hidden_states])
        attentions.append([weights for weights in result.attentions])
        if head == "qa":
            logits.append(torch.stack([result.start_logits[0], result.end_logits[0]], dim=1))
        elif head != "model":
            logits.append(result.logits[0])
    out = {f"hidden.{i}": torch.cat(parts) for i, parts in enumerate(zip(*states))}
    if head == "model":
        for layer in range(golden.LAYERS):
            for i, weights in enumerate(attentions):
                # transformers gives them as sequence, query, key, head here.
                out[f"attention.{layer}.{i}"] = in_heads(weights[layer])
        loss = out[f"hidden.{golden.LAYERS}"].square().mean()
    elif head == "mlm":
        out["logits"] = torch.cat(logits)[data["rows"]]
        loss = cross_entropy(out["logits"], data["targets"])
    elif head == "qa":
        out["logits"] = torch.cat(logits)
        loss = qa_loss(logits, data)
    elif head == "sequence":
        out["logits"] = torch.stack(logits)
        loss = cross_entropy(out["logits"], data["labels"])
    elif head == "choice":
        out["logits"] = torch.stack(logits).reshape(-1, 1)
        loss = cross_entropy(out["logits"].view(-1, golden.CHOICES), data["labels"])
    else:
        out["logits"] = torch.cat(logits)
        loss = cross_entropy(out["logits"], data["labels"])
    out["loss"] = loss.reshape(1)
    return loss, out


def in_heads(weights):
    """One sequence's attention as head, query, key: rows sum to one over keys."""
    weights = weights[0] if weights.dim() == 4 else weights
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        turned = weights.permute(*order)
        if turned.shape[0] == golden.HEADS and torch.allclose(turned.sum(2), torch.ones_like(turned.sum(2)), atol=1e-5):
            return turned
    raise AssertionError(weights.shape)


def qa_loss(logits, data):
    total = 0
    for side, at in enumerate([data["start"], data["end"]]):
        terms = [cross_entropy(part[None, :, side], at[i : i + 1]) for i, part in enumerate(logits) if at[i] < len(part)]
        total = total + torch.stack(terms).mean()
    return total / 2


def train(model, head, data):
    named = list(model.named_parameters())
    plain = lambda name, p: p.dim() == 1 or name.endswith("bias")
    groups = [
        {"params": [p for n, p in named if not plain(n, p)], "weight_decay": 0.01},
        {"params": [p for n, p in named if plain(n, p)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.999), eps=1e-6)
    losses, norms = [], []
    for _ in range(golden.STEPS):
        loss, _ = forward(model, head, data)
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        losses.append(loss.detach())
    return {"steps.losses": torch.stack(losses), "steps.grad_norms": torch.stack(norms)}


def main():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    default = Path(__file__).resolve().parents[2] / "tests-data" / "relatives-golden" / "xlnet"
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else default
    shutil.rmtree(root, ignore_errors=True)
    golden.make_model, golden.make_input, golden.forward, golden.train = make_model, make_input, forward, train
    golden.check_qa_loss = lambda model, data: None
    for head in HEADS:
        golden.make_head(head, root / head)
        (root / head / "generation_config.json").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
