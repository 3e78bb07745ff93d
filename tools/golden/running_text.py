"""Makes tests-data/running-text/golden.json: language models on running text, in PyTorch and f64.

    python tools/golden/running_text.py tests-data/running-text

A text is divided into rows that are read a few units at a time; states go on from step to step, gradients do not, and every epoch begins
with zeros. The first model is an LSTM over tokens (Zaremba et al. 2014), updated by gradient descent on the sum of a row's losses, clipped;
the second a small ELMo (Peters et al. 2018) over words as characters, updated by Adagrad from sums of 1. The losses of steps across the
border of an epoch are kept, and of every parameter after the last one Σ p·sin(j + 1).

The third is a tiny XLNet of `transformers` with a memory (Yang et al. 2019): what every layer read in the sequence before, of which the last
token is not kept. Which tokens of a sequence are predicted, and in which order, is drawn here and written down: `orders` has 0 for
tokens that all see, `targets` the places of what is predicted.

Parameters begin as those of recurrent.py: element i of the k-th (names sorted) is 0.4·sin(0.7·i + 1.3·k).
"""

import json
import sys
from collections import Counter
from pathlib import Path

import torch
import transformers

torch.set_default_dtype(torch.float64)

# Documents of sentences of words.
TEXT = [
    ["the cat sat on the mat", "a dog saw the cat", "incomprehensibly the dog ran"],
    ["the na\u00efve cat sat", "a cat ran on the mat and the dog sat"],
]
STEPS = 8


def fill(parameters):
    with torch.no_grad():
        for k, name in enumerate(sorted(parameters)):
            x = parameters[name]
            i = torch.arange(x.numel())
            x.copy_((0.4 * torch.sin(0.7 * i + 1.3 * k)).to(torch.float32).to(x.dtype).reshape(x.shape))


def summary(parameters):
    return {
        name: float((x.detach().reshape(-1) * torch.sin(torch.arange(x.numel()) + 1.0)).sum())
        for name, x in parameters.items()
    }


def clip(parameters, most):
    norm = torch.sqrt(sum((p.grad**2).sum() for p in parameters))
    factor = min(1.0, most / (float(norm) + 1e-6))
    for p in parameters:
        p.grad *= factor
    return float(norm)


def tokens():
    """2 rows, 16 tokens at a time: ids are the letters of the text, 0 behind each document."""
    vocabulary, hidden, rows, length = 31, 6, 2, 16
    text = []
    for document in TEXT:
        text += [1 + byte % 30 for sentence in document for byte in sentence.encode()] + [0]
    per_row = (len(text) - 1) // rows
    steps = per_row // length
    lstm = torch.nn.LSTM(hidden, hidden, num_layers=2, batch_first=True)
    parameters = {"lstm.embeddings.weight": torch.zeros(vocabulary, hidden, requires_grad=True)}
    parameters |= {f"lstm.layers.{name}": p for name, p in lstm.named_parameters()}
    parameters["lm_head.weight"] = torch.zeros(vocabulary, hidden, requires_grad=True)
    parameters["lm_head.bias"] = torch.zeros(vocabulary, requires_grad=True)
    fill(parameters)
    losses, norms, state = [], [], None
    for step in range(STEPS):
        at = step % steps
        if at == 0:
            state = None
        x = torch.tensor([text[r * per_row + at * length :][:length] for r in range(rows)])
        y = torch.tensor([text[r * per_row + at * length + 1 :][:length] for r in range(rows)])
        out, last = lstm(parameters["lstm.embeddings.weight"][x], state)
        state = tuple(part.detach() for part in last)
        logits = out @ parameters["lm_head.weight"].T + parameters["lm_head.bias"]
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, vocabulary), y.reshape(-1))
        for p in parameters.values():
            p.grad = None
        (loss * length).backward()
        norms.append(clip(parameters.values(), 5.0))
        with torch.no_grad():
            for p in parameters.values():
                p -= 0.5 * p.grad
        losses.append(loss.item())
    return dict(epoch=steps, losses=losses, norms=norms, parameters=summary(parameters))


CHARACTERS, EMBEDDING, FILTERS, PROJECTION, CELLS, LAYERS, MOST = 261, 4, [(1, 3), (2, 4), (3, 5)], 6, 5, 2, 12


def elmo_parameters(words):
    filters = sum(count for _, count in FILTERS)
    shapes = {"elmo.words.characters.weight": (CHARACTERS, EMBEDDING)}
    for i, (width, count) in enumerate(FILTERS):
        shapes[f"elmo.words.filters.{i}.weight"] = (count, width * EMBEDDING)
        shapes[f"elmo.words.filters.{i}.bias"] = (count,)
    for part in ["transform", "gate"]:
        shapes[f"elmo.words.highways.0.{part}.weight"] = (filters, filters)
        shapes[f"elmo.words.highways.0.{part}.bias"] = (filters,)
    shapes["elmo.words.projection.weight"] = (PROJECTION, filters)
    shapes["elmo.words.projection.bias"] = (PROJECTION,)
    for direction in ["forward_lm", "backward_lm"]:
        for layer in range(LAYERS):
            shapes[f"elmo.{direction}.weight_ih_l{layer}"] = (4 * CELLS, PROJECTION)
            shapes[f"elmo.{direction}.weight_hh_l{layer}"] = (4 * CELLS, PROJECTION)
            shapes[f"elmo.{direction}.bias_ih_l{layer}"] = (4 * CELLS,)
            shapes[f"elmo.{direction}.weight_hr_l{layer}"] = (PROJECTION, CELLS)
    shapes["softmax.weight"] = (words, PROJECTION)
    shapes["softmax.bias"] = (words,)
    return {name: torch.zeros(*shape, requires_grad=True) for name, shape in shapes.items()}


def spell(word):
    ids = [256] if word == "<S>" else [257] if word == "</S>" else list(word.encode())[: MOST - 2]
    ids = [258] + ids + [259]
    return ids + [260] * (MOST - len(ids))


def vectors(words, p):
    x = p["elmo.words.characters.weight"][torch.tensor([spell(word) for word in words])]
    parts = []
    for i, (width, _) in enumerate(FILTERS):
        windows = torch.stack([x[:, at : at + width].reshape(len(words), -1) for at in range(MOST - width + 1)], 1)
        values = windows @ p[f"elmo.words.filters.{i}.weight"].T + p[f"elmo.words.filters.{i}.bias"]
        parts.append(torch.relu(values.max(1).values))
    x = torch.cat(parts, 1)
    part = lambda name: x @ p[f"elmo.words.highways.0.{name}.weight"].T + p[f"elmo.words.highways.0.{name}.bias"]
    gate, transform = torch.sigmoid(part("gate")), torch.relu(part("transform"))
    x = gate * transform + (1 - gate) * x
    return x @ p["elmo.words.projection.weight"].T + p["elmo.words.projection.bias"]


def read(x, name, p, states):
    """x: rows × words × P in the order of reading."""
    after = []
    for layer in range(LAYERS):
        of = lambda what: p[f"elmo.{name}.{what}_l{layer}"]
        h, c = states[layer] if states else (torch.zeros(len(x), PROJECTION), torch.zeros(len(x), CELLS))
        out = []
        for t in range(x.shape[1]):
            z = x[:, t] @ of("weight_ih").T + h @ of("weight_hh").T + of("bias_ih")
            i, f, g, o = z.split(CELLS, 1)
            c = (torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)).clamp(-0.3, 0.3)
            h = ((torch.sigmoid(o) * torch.tanh(c)) @ of("weight_hr").T).clamp(-0.2, 0.2)
            out.append(h)
        out = torch.stack(out, 1)
        x = out + x if layer > 0 else out
        after.append((h.detach(), c.detach()))
    return x, after


def words():
    """2 rows, 4 words at a time, in both directions."""
    rows, length, most = 2, 4, 9
    counts = Counter(word for document in TEXT for sentence in document for word in sentence.split())
    order = sorted(counts, key=lambda word: (-counts[word], word))
    known = (["</S>", "<S>", "<UNK>"] + order)[:most]
    number = lambda word: known.index(word) if word in known else 2
    text = [w for document in TEXT for sentence in document for w in ["<S>", *sentence.split(), "</S>"]]
    per_row = (len(text) - 1) // rows
    steps = per_row // length
    p = elmo_parameters(len(known))
    fill(p)
    sums = {name: torch.ones_like(x) for name, x in p.items()}
    losses, norms, states = [], [], [None, None]
    for step in range(STEPS):
        at = step % steps
        if at == 0:
            states = [None, None]
        found = []
        for direction, name in enumerate(["forward_lm", "backward_lm"]):
            if direction == 0:
                places = [[r * per_row + at * length + i for i in range(length)] for r in range(rows)]
                shift = 1
            else:
                end = lambda r: r * per_row + steps * length - at * length
                places = [[end(r) - i for i in range(length)] for r in range(rows)]
                shift = -1
            x = torch.stack([vectors([text[i] for i in row], p) for row in places])
            y = torch.tensor([[number(text[i + shift]) for i in row] for row in places])
            out, states[direction] = read(x, name, p, states[direction])
            logits = out @ p["softmax.weight"].T + p["softmax.bias"]
            found.append(torch.nn.functional.cross_entropy(logits.reshape(-1, len(known)), y.reshape(-1)))
        for x in p.values():
            x.grad = None
        (length * (found[0] + found[1]) / 2).backward()
        norms.append(clip(p.values(), 0.7))
        with torch.no_grad():
            for name, x in p.items():
                sums[name] += x.grad**2
                x -= 0.2 * x.grad / (torch.sqrt(sums[name]) + 1e-6)
        losses.append([loss.item() for loss in found])
    return dict(epoch=steps, words=known, losses=losses, norms=norms, parameters=summary(p))


class Exact(transformers.XLNetModel):
    """Its table of distances stays in f32, which two streams in f64 do not take."""

    def relative_positional_encoding(self, *sizes, **more):
        return super().relative_positional_encoding(*sizes, **more).to(self.dtype)


def own_layout(name, p):
    """A parameter as henson has it: what projects tokens and distances, with a row for each output."""
    hidden = p.shape[0]
    return p.detach().reshape(hidden, -1).T if name.endswith((".q", ".k", ".v", ".r")) else p.detach()


def in_order():
    """2 rows, 8 tokens at a time: one that stands before the text, 6 of the text, one behind."""
    rows, length, first, last, epoch = 2, 8, 2, 3, 5
    config = transformers.XLNetConfig(
        vocab_size=31, d_model=8, n_layer=2, n_head=2, d_inner=12, mem_len=10, reuse_len=length - 1, dropout=0.0
    )
    model = transformers.XLNetLMHeadModel(config).double().eval()
    model.transformer.__class__ = Exact
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for k, name in enumerate(sorted(parameters)):
            p = parameters[name]
            i = torch.arange(p.numel())
            values = (0.4 * torch.sin(0.7 * i + 1.3 * k)).to(torch.float32).to(p.dtype)
            own = own_layout(name, p)
            values = values.reshape(own.shape)
            p.copy_((values.T if own.shape != p.shape else values).reshape(p.shape))
    text = [5 + byte % 26 for document in TEXT for sentence in document for byte in sentence.encode()]
    per_row = epoch * (length - 2)
    rng = torch.Generator().manual_seed(7)
    batches, losses, norms, memory = [], [], [], None
    for step in range(STEPS):
        at = step % epoch
        if at == 0:
            memory = [None] * rows
        batch, logits, labels = [], [], []
        for row in range(rows):
            start = row * per_row + at * (length - 2)
            ids = [first, *text[start : start + length - 2], last]
            order = torch.randperm(length, generator=rng) + 1
            hidden = torch.randperm(length - 2, generator=rng)[: 2 + (step + row) % 2] + 1
            # The last one is hidden without being predicted, as special tokens are.
            orders = torch.zeros(length, dtype=torch.long).scatter(0, hidden, order[hidden])
            orders[-1] = order[-1]
            targets = hidden.sort().values
            batch.append(dict(ids=ids, orders=orders.tolist(), targets=targets.tolist()))
            unseen = (orders[None, :] >= orders.clamp(min=1)[:, None]).to(model.dtype)
            mapping = torch.zeros(1, len(targets), length, dtype=model.dtype)
            mapping[0, torch.arange(len(targets)), targets] = 1
            segments = torch.zeros(1, length, dtype=torch.long)
            ids = torch.tensor([ids])
            out = model(
                ids, mems=memory[row], perm_mask=unseen[None], target_mapping=mapping, token_type_ids=segments, use_mems=True
            )
            memory[row] = [state.detach() for state in out.mems]
            logits.append(out.logits[0])
            labels.append(ids[0, targets])
        loss = torch.nn.functional.cross_entropy(torch.cat(logits), torch.cat(labels))
        model.zero_grad()
        loss.backward()
        norms.append(clip(parameters.values(), 1.0))
        with torch.no_grad():
            for p in parameters.values():
                p -= 0.5 * p.grad
        batches.append(batch)
        losses.append(loss.item())
    after = summary({name: own_layout(name, p) for name, p in parameters.items()})
    return dict(epoch=epoch, batches=batches, losses=losses, norms=norms, parameters=after)


if __name__ == "__main__":
    golden = dict(text=TEXT, tokens=tokens(), words=words(), in_order=in_order())
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    Path(sys.argv[1], "golden.json").write_text(json.dumps(golden, ensure_ascii=False, indent=1) + "\n")
