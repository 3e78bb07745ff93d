"""Makes tests-data/recurrent: layers of torch.nn on packed sequences, a field of pytorch-crf and words read as characters, values and
gradients.

    pip install pytorch-crf
    python tools/golden/recurrent.py tests-data/recurrent

Nothing that goes in is stored: element i of the k-th parameter (names sorted by bytes, the input `x` and first states among them) is
a·sin(0.7·i + 1.3·k), with a = 1 for `x` and first states and 0.4 for the others. The loss is Σ y·sin(0.3·j + 1) over all elements j of
the outputs, one sequence after the other, then the last states (`h`, and `c` of an LSTM) where a case has first ones. All is in f64,
rounded at the end. The outputs of attentions and poolings come as they are in the script. Keys are CASE/output,
CASE/gradient.NAME; of the field CASE/loss, CASE/tags, CASE/gradient.NAME.

Words are filled up to all their characters, as ELMo's authors do, whether they make a difference or not.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torchcrf import CRF

LENGTHS = [4, 1, 9, 6]
CASES = {
    "lstm": dict(kind=torch.nn.LSTM, num_layers=2, bidirectional=True),
    "lstm-projected": dict(kind=torch.nn.LSTM, num_layers=2, bidirectional=True, proj_size=3),
    "lstm-states": dict(kind=torch.nn.LSTM, num_layers=1, bidirectional=True, states=True),
    "gru": dict(kind=torch.nn.GRU, num_layers=2, bidirectional=True),
    "gru-states": dict(kind=torch.nn.GRU, num_layers=1, bidirectional=False, states=True),
    "tanh": dict(kind=torch.nn.RNN, num_layers=1, bidirectional=True),
    "relu": dict(kind=torch.nn.RNN, num_layers=2, bidirectional=False, nonlinearity="relu"),
}
INPUT, HIDDEN, LABELS = 5, 7, 5


def fill(parameters):
    with torch.no_grad():
        for k, name in enumerate(sorted(parameters)):
            x = parameters[name]
            i = torch.arange(x.numel(), dtype=torch.float64)
            size = 1.0 if name in ("x", "h", "c") else 0.4
            x.copy_((size * torch.sin(0.7 * i + 1.3 * k)).to(torch.float32).to(x.dtype).reshape(x.shape))


def recurrent(kind, states=False, **settings):
    torch.manual_seed(0)
    network = kind(INPUT, HIDDEN, batch_first=True, **settings).double()
    directions = 2 if settings.get("bidirectional") else 1
    parameters = dict(network.named_parameters())
    parameters["x"] = torch.zeros(sum(LENGTHS), INPUT, dtype=torch.float64, requires_grad=True)
    initial = None
    if states:
        names = ["h", "c"] if kind is torch.nn.LSTM else ["h"]
        for name in names:
            parameters[name] = torch.zeros(directions, len(LENGTHS), HIDDEN, dtype=torch.float64, requires_grad=True)
    fill(parameters)
    if states:
        initial = tuple(parameters[name] for name in names)
        initial = initial if len(initial) == 2 else initial[0]
    sequences = list(torch.split(parameters["x"], LENGTHS))
    packed = torch.nn.utils.rnn.pack_sequence(sequences, enforce_sorted=False)
    out, last = network(packed, initial)
    padded, lengths = torch.nn.utils.rnn.pad_packed_sequence(out, batch_first=True)
    outputs = [torch.cat([row[:n] for row, n in zip(padded, lengths)])]
    if states:
        outputs += list(last) if isinstance(last, tuple) else [last]
    flat = torch.cat([y.reshape(-1) for y in outputs])
    (flat * torch.sin(0.3 * torch.arange(flat.numel(), dtype=torch.float64) + 1)).sum().backward()
    result = {"output": flat.detach()}
    result.update({f"gradient.{name}": x.grad for name, x in parameters.items()})
    return result


def field():
    crf = CRF(LABELS, batch_first=True).double()
    parameters = dict(crf.named_parameters())
    parameters["x"] = torch.zeros(sum(LENGTHS), LABELS, dtype=torch.float64, requires_grad=True)
    fill(parameters)
    tags = torch.tensor([i * i % LABELS for i in range(sum(LENGTHS))])
    pad = lambda x: torch.nn.utils.rnn.pad_sequence(list(torch.split(x, LENGTHS)), batch_first=True)
    mask = pad(torch.ones(sum(LENGTHS), dtype=torch.bool))
    loss = -crf(pad(parameters["x"]), pad(tags), mask=mask, reduction="sum")
    loss.backward()
    best = torch.tensor(sum(crf.decode(pad(parameters["x"]), mask=mask), []))
    result = {"loss": loss.detach().reshape(1), "tags": best}
    result.update({f"gradient.{name}": x.grad for name, x in parameters.items()})
    return result


WORDS = ["The", "naïve", "cat", "The", "", "incomprehensibilities", "cat", "a"]
MOST = 14


def spelled(words):
    """The ids of their characters."""
    rows = [[258, *word.encode()[: MOST - 2], 259] for word in words]
    return torch.tensor([row + [260] * (MOST - len(row)) for row in rows])


def characters(activation, filters, highways, projection, size=6):
    parameters = {"characters.weight": torch.zeros(261, size)}
    for i, (width, count) in enumerate(filters):
        parameters[f"filters.{i}.weight"] = torch.zeros(count, width, size)
        parameters[f"filters.{i}.bias"] = torch.zeros(count)
    n = sum(count for _, count in filters)
    for i in range(highways):
        for part in ["transform", "gate"]:
            parameters[f"highways.{i}.{part}.weight"] = torch.zeros(n, n)
            parameters[f"highways.{i}.{part}.bias"] = torch.zeros(n)
    if projection:
        parameters["projection.weight"] = torch.zeros(projection, n)
        parameters["projection.bias"] = torch.zeros(projection)
    parameters = {name: x.double().requires_grad_() for name, x in parameters.items()}
    fill(parameters)
    linear = lambda x, name: torch.nn.functional.linear(x, parameters[name + ".weight"], parameters[name + ".bias"])
    x = torch.nn.functional.embedding(spelled(WORDS), parameters["characters.weight"]).transpose(1, 2)
    largest = []
    for i in range(len(filters)):
        weight = parameters[f"filters.{i}.weight"].transpose(1, 2)
        largest.append(torch.nn.functional.conv1d(x, weight, parameters[f"filters.{i}.bias"]).amax(2))
    x = activation(torch.cat(largest, 1))
    for i in range(highways):
        gate = torch.sigmoid(linear(x, f"highways.{i}.gate"))
        x = gate * torch.relu(linear(x, f"highways.{i}.transform")) + (1 - gate) * x
    if projection:
        x = linear(x, "projection")
    return finish(parameters, [x])


def tagger(labels=5, width=4, size=6, filters=7, units=3):
    """A BiLSTM over vectors of words and what filters find in their characters (Ma and Hovy 2016): its logits."""
    lstm = torch.nn.LSTM(width + filters, units, bidirectional=True).double()
    sizes = {
        "bilstm.embeddings.word_embeddings.weight": (4, width),
        "bilstm.words.characters.weight": (261, size),
        "bilstm.words.filters.0.weight": (filters, 3, size),
        "bilstm.words.filters.0.bias": (filters,),
        "classifier.weight": (labels, 2 * units),
        "classifier.bias": (labels,),
    }
    p = {name: torch.zeros(size, dtype=torch.float64, requires_grad=True) for name, size in sizes.items()}
    p.update({f"bilstm.lstm.{name}": x for name, x in lstm.named_parameters()})
    fill(p)
    outputs = []
    for words in (WORDS[:5], WORDS[5:]):
        ids = torch.tensor([{"The": 2, "cat": 3}.get(word, 1) for word in words])
        letters = p["bilstm.words.characters.weight"][spelled(words)].transpose(1, 2)
        weight, bias = p["bilstm.words.filters.0.weight"].transpose(1, 2), p["bilstm.words.filters.0.bias"]
        found = torch.tanh(torch.nn.functional.conv1d(letters, weight, bias).amax(2))
        x = torch.cat([p["bilstm.embeddings.word_embeddings.weight"][ids], found], -1)
        outputs.append(lstm(x[:, None])[0][:, 0] @ p["classifier.weight"].T + p["classifier.bias"])
    return finish(p, outputs)


def attention(score):
    """Queries over the sequences of x: additive (Bahdanau et al. 2015), or multiplicative as in Luong et al. (2015)."""
    of_queries, width = [2, 3, 1, 4], 6
    sizes = {"x": (sum(LENGTHS), INPUT), "q": (sum(of_queries), INPUT)}
    if score == "additive":
        sizes.update(keys=(width, INPUT), queries=(width, INPUT), v=(width,))
    if score == "general":
        sizes.update(queries=(INPUT, INPUT))
    parameters = {name: torch.zeros(size, dtype=torch.float64, requires_grad=True) for name, size in sizes.items()}
    fill(parameters)
    outputs = []
    for x, q in zip(torch.split(parameters["x"], LENGTHS), torch.split(parameters["q"], of_queries)):
        if score == "additive":
            both = (q @ parameters["queries"].T)[:, None, :] + (x @ parameters["keys"].T)[None, :, :]
            scores = torch.tanh(both) @ parameters["v"]
        elif score == "general":
            scores = (q @ parameters["queries"].T) @ x.T
        else:
            scores = q @ x.T
        outputs.append(torch.softmax(scores, -1) @ x)
    return finish(parameters, outputs)


def pooling():
    """Sequences of x as one vector: by learned weights, by their largest, by their mean."""
    sizes = {"x": (sum(LENGTHS), INPUT), "weight": (6, INPUT), "bias": (6,), "v": (6,)}
    parameters = {name: torch.zeros(size, dtype=torch.float64, requires_grad=True) for name, size in sizes.items()}
    fill(parameters)
    sequences = torch.split(parameters["x"], LENGTHS)
    scores = [torch.tanh(x @ parameters["weight"].T + parameters["bias"]) @ parameters["v"] for x in sequences]
    learned = [torch.softmax(s, 0) @ x for s, x in zip(scores, sequences)]
    return finish(parameters, learned + [x.max(0).values for x in sequences] + [x.mean(0) for x in sequences])


SOURCES, TARGETS, VOCABULARY = [4, 1, 6], [3, 5, 2], 11


def seq2seq(cell, score, bidirectional, feeding="none"):
    """An encoder-decoder with attention (Luong et al. 2015, section 3): its logits."""
    p, logits, _, _ = encoder_decoder(cell, score, bidirectional, feeding)
    return finish(p, logits())


def writing(cell, score, bidirectional, feeding, length=8, beams=3):
    """What it writes for each source without an end: the likeliest tokens one after the other, and the best of a search with beams."""
    _, _, _, logits_of = encoder_decoder(cell, score, bidirectional, feeding)
    greedy, found = [], []
    for source in torch.split(torch.arange(sum(SOURCES)) * 7 % VOCABULARY, SOURCES):
        def next_scores(written):
            return torch.log_softmax(logits_of(source, torch.tensor([*written, 0]))[-1], -1).detach()

        for width, to in ((1, greedy), (beams, found)):
            best = [(0.0, [])]
            for _ in range(length):
                longer = [(sum_ + s.item(), [*ids, i]) for sum_, ids in best for i, s in enumerate(next_scores(ids))]
                longer.sort(key=lambda one: -one[0])
                assert longer[width - 1][0] - longer[width][0] > 1e-4, "nearly equal"
                best = longer[:width]
            to.extend(id for _, ids in best for id in ids)
    return {"greedy": torch.tensor(greedy), "beams": torch.tensor(found)}


def training(cell, score, bidirectional, feeding="none", updates=10):
    """The losses of its updates by Adam, clipped, each before the update, and all parameters after the last one."""
    p, logits, targets, _ = encoder_decoder(cell, score, bidirectional, feeding)
    adam = torch.optim.Adam(p.values(), lr=1e-2, eps=1e-6)
    losses = []
    for _ in range(updates):
        adam.zero_grad()
        loss = torch.nn.functional.cross_entropy(torch.cat(logits()), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(p.values(), 0.5)
        adam.step()
        losses.append(loss.detach())
    return {"losses": torch.stack(losses)} | {f"after.{name}": x.detach() for name, x in p.items()}


def encoder_decoder(cell, score, bidirectional, feeding="none", layers=2, width=5, hidden=8):
    """Its parameters, what gives its logits, the targets, and what gives the logits of one pair. Token i of a stream is 7·i mod 11.

    A step of the decoder may also read what the state before it attends to ("context", Bahdanau et al. 2015), or what the step before
    it predicted from ("output", section 3.3 of Luong et al.).
    """
    kind = torch.nn.LSTM if cell == "lstm" else torch.nn.GRU
    units = hidden // 2 if bidirectional else hidden
    encoder = kind(width, units, layers, bidirectional=bidirectional).double()
    decoder = kind(width + (hidden if feeding != "none" else 0), hidden, layers).double()
    sizes = {"model.shared.weight": (VOCABULARY, width), "lm_head.weight": (VOCABULARY, hidden), "lm_head.bias": (VOCABULARY,)}
    if score != "none":
        sizes.update({"model.attention.combine.weight": (hidden, 2 * hidden), "model.attention.combine.bias": (hidden,)})
    if score == "general":
        sizes["model.attention.score.weight"] = (hidden, hidden)
    if score == "additive":
        sizes.update({f"model.attention.{name}.weight": (hidden, hidden) for name in ("query", "key")})
        sizes["model.attention.score.weight"] = (hidden,)
    p = {name: torch.zeros(size, dtype=torch.float64, requires_grad=True) for name, size in sizes.items()}
    p.update({f"model.encoder.{name}": x for name, x in encoder.named_parameters()})
    p.update({f"model.decoder.{name}": x for name, x in decoder.named_parameters()})
    fill(p)
    tokens = lambda lengths: torch.split(torch.arange(sum(lengths)) * 7 % VOCABULARY, lengths)

    def attend(states, memory):
        if score == "additive":
            queries = states @ p["model.attention.query.weight"].T
            both = queries[:, None] + (memory @ p["model.attention.key.weight"].T)[None]
            scores = torch.tanh(both) @ p["model.attention.score.weight"]
        else:
            queries = states @ p["model.attention.score.weight"].T if score == "general" else states
            scores = queries @ memory.T
        return torch.softmax(scores, -1) @ memory

    def combine(context, states):
        both = torch.cat([context, states], -1)
        return torch.tanh(both @ p["model.attention.combine.weight"].T + p["model.attention.combine.bias"])

    def in_steps(read, last, memory):
        out, fed = [], torch.zeros(1, hidden, dtype=torch.float64)
        for token in read:
            if feeding == "context":
                fed = attend((last[0] if cell == "lstm" else last)[-1], memory)
            x = torch.cat([p["model.shared.weight"][token][None], fed], -1)
            state, last = decoder(x[:, None], last)
            context = fed if feeding == "context" else attend(state[:, 0], memory)
            out.append(combine(context, state[:, 0]))
            fed = out[-1]
        return torch.cat(out)

    def logits_of(source, target):
        read = torch.cat([torch.zeros(1, dtype=torch.long), target[:-1]])
        memory, last = encoder(p["model.shared.weight"][source][:, None])
        join = lambda x: torch.cat([x[0::2], x[1::2]], -1) if bidirectional else x
        last = tuple(map(join, last)) if cell == "lstm" else join(last)
        memory = memory[:, 0]
        if feeding != "none":
            states = in_steps(read, last, memory)
        else:
            states = decoder(p["model.shared.weight"][read][:, None], last)[0][:, 0]
            if score != "none":
                states = combine(attend(states, memory), states)
        return states @ p["lm_head.weight"].T + p["lm_head.bias"]

    def logits():
        return [logits_of(source, target) for source, target in zip(tokens(SOURCES), tokens(TARGETS))]

    return p, logits, torch.cat(tokens(TARGETS)), logits_of


def finish(parameters, outputs):
    flat = torch.cat([y.reshape(-1) for y in outputs])
    (flat * torch.sin(0.3 * torch.arange(flat.numel(), dtype=torch.float64) + 1)).sum().backward()
    result = {"output": flat.detach()}
    result.update({f"gradient.{name}": x.grad for name, x in parameters.items()})
    return result


def main(directory):
    directory.mkdir(parents=True, exist_ok=True)
    results = {name: recurrent(**settings) for name, settings in CASES.items()}
    results["crf"] = field()
    results["characters"] = characters(torch.relu, [(1, 3), (2, 5), (4, 9)], highways=2, projection=7)
    results["characters-tanh"] = characters(torch.tanh, [(3, 11)], highways=0, projection=None)
    results.update({f"attention-{score}": attention(score) for score in ("additive", "general", "dot")})
    results["pooling"] = pooling()
    results["tagger-characters"] = tagger()
    for cell, score, both in [("lstm", "general", True), ("gru", "additive", True), ("lstm", "dot", False), ("gru", "none", False)]:
        results[f"seq2seq-{cell}-{score}"] = seq2seq(cell, score, both)
    for cell, score in [("lstm", "general"), ("gru", "additive")]:
        results[f"training-{cell}-{score}"] = training(cell, score, bidirectional=True)
    for cell, score, both, feeding in [("lstm", "general", True, "output"), ("gru", "additive", True, "context"), ("lstm", "dot", False, "context")]:
        results[f"seq2seq-{cell}-{score}-{feeding}"] = seq2seq(cell, score, both, feeding)
        results[f"writing-{cell}-{score}-{feeding}"] = writing(cell, score, both, feeding)
        if both:
            results[f"training-{cell}-{score}-{feeding}"] = training(cell, score, both, feeding)
    tensors = {
        f"{case}/{name}": x.to(torch.float32).contiguous().clone()
        for case, result in results.items()
        for name, x in result.items()
    }
    save_file(tensors, directory / "golden.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
