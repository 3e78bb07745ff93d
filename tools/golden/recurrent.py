"""Makes tests-data/recurrent: layers of torch.nn on packed sequences, a field of pytorch-crf and words read as characters, values and
gradients.

    pip install pytorch-crf
    python tools/golden/recurrent.py tests-data/recurrent

Nothing that goes in is stored: element i of the k-th parameter (names sorted by bytes, the input `x` and first states among them) is
a·sin(0.7·i + 1.3·k), with a = 1 for `x` and first states and 0.4 for the others. The loss is Σ y·sin(0.3·j + 1) over all elements j of
the outputs, one sequence after the other, then the last states (`h`, and `c` of an LSTM) where a case has first ones. All is in f64,
rounded at the end. Keys are CASE/output, CASE/gradient.NAME; of the field CASE/loss, CASE/tags, CASE/gradient.NAME.

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


def characters(activation, filters, highways, projection, size=6):
    ids = []
    for word in WORDS:
        row = [258, *word.encode()[: MOST - 2], 259]
        ids.append(row + [260] * (MOST - len(row)))
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
    x = torch.nn.functional.embedding(torch.tensor(ids), parameters["characters.weight"]).transpose(1, 2)
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
    flat = x.reshape(-1)
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
    tensors = {
        f"{case}/{name}": x.to(torch.float32).contiguous().clone()
        for case, result in results.items()
        for name, x in result.items()
    }
    save_file(tensors, directory / "golden.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
