"""Makes tests-data/elmo: two small ELMo models of AllenNLP and bilm-tf (Apache-2.0) with the vectors of all their layers.

    pip install h5py numpy safetensors
    python tools/golden/elmo.py FIXTURE… tests-data/elmo

FIXTURE is allennlp's test_fixtures/elmo or bilm-tf's tests/fixtures/model (with options.json, lm_weights.hdf5, the sentences and
lm_embeddings_{0,1,2}.hdf5). Three lists of ten sentences run side by side; sentence i of list k begins with the states that sentence i − 1
of list k ended with. Keys of golden.safetensors, each with a row for every word of every sentence, list by list: `expected` (the authors'
own numbers: the top layer with carried states), `carried.0`, `carried.1` (the layers below), and `fresh.0`, `fresh.1`, `fresh.2` (all
layers, every sentence from zeros). What is not the authors' is computed here in f64; `expected` is compared with it first.
"""

import json
import shutil
import sys
from pathlib import Path

import h5py
import numpy as np
from safetensors.numpy import save_file


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


class Elmo:
    def __init__(self, directory):
        self.options = json.loads((directory / "options.json").read_text())
        with h5py.File(directory / "lm_weights.hdf5", "r") as file:
            self.arrays = {}
            file.visititems(lambda name, x: self.arrays.update({name: x[...].astype(np.float64)}) if hasattr(x, "shape") else None)
        self.known = {}

    def word(self, word):
        if word in self.known:
            return self.known[word]
        cnn, a = self.options["char_cnn"], self.arrays
        most = cnn["max_characters_per_token"]
        marks = {"<S>": [256], "</S>": [257]}
        ids = [258, *marks.get(word, word.encode()[: most - 2]), 259]
        x = a["char_embed"][ids + [260] * (most - len(ids))]
        largest = []
        for i, (width, _) in enumerate(cnn["filters"]):
            filters = a[f"CNN/W_cnn_{i}"][0]
            sums = [np.einsum("kd,kdf->f", x[t : t + width], filters) for t in range(most - width + 1)]
            largest.append(np.max(sums, 0) + a[f"CNN/b_cnn_{i}"])
        y = np.concatenate(largest)
        y = np.tanh(y) if cnn["activation"] == "tanh" else np.maximum(y, 0)
        for i in range(cnn["n_highway"]):
            part = lambda name: y @ a[f"CNN_high_{i}/W_{name}"] + a[f"CNN_high_{i}/b_{name}"]
            carry, new = sigmoid(part("carry")), np.maximum(part("transform"), 0)
            y = carry * new + (1 - carry) * y
        if "CNN_proj/W_proj" in a:
            y = y @ a["CNN_proj/W_proj"] + a["CNN_proj/b_proj"]
        self.known[word] = y
        return y

    def zeros(self):
        lstm = self.options["lstm"]
        return {(d, l): (np.zeros(lstm["projection_dim"]), np.zeros(lstm["dim"])) for d in (0, 1) for l in range(lstm["n_layers"])}

    def layers(self, sentence, states):
        """All layers (words × 2P each); `states` becomes what they end with."""
        lstm = self.options["lstm"]
        words = np.array([self.word(word) for word in ["<S>", *sentence.split(), "</S>"]])
        outputs = [[], []]
        for d in (0, 1):
            x = words[:: 1 - 2 * d]
            for l in range(lstm["n_layers"]):
                name = f"RNN_{d}/RNN/MultiRNNCell/Cell{l}/LSTMCell/"
                w, b, p = (self.arrays[name + part] for part in ("W_0", "B", "W_P_0"))
                h, c = states[d, l]
                y = []
                for row in x:
                    i, j, f, o = np.split(np.concatenate([row, h]) @ w + b, 4)
                    c = np.clip(sigmoid(f + 1) * c + sigmoid(i) * np.tanh(j), -lstm["cell_clip"], lstm["cell_clip"])
                    h = np.clip((sigmoid(o) * np.tanh(c)) @ p, -lstm["proj_clip"], lstm["proj_clip"])
                    y.append(h)
                states[d, l] = (h, c)
                y = np.array(y)
                x = x + y if l > 0 and lstm["use_skip_connections"] else y
                outputs[d].append(x[:: 1 - 2 * d])
        both = [np.concatenate([words, words], 1)]
        both += [np.concatenate(pair, 1) for pair in zip(*outputs)]
        return [layer[1:-1] for layer in both]


def main(fixtures, out):
    for fixture in map(Path, fixtures):
        elmo = Elmo(fixture)
        name = "skip" if elmo.options["lstm"]["use_skip_connections"] else "plain"
        sentences = next(json.loads(path.read_text()) for path in fixture.glob("*sentences.json"))
        tensors = {key: [] for key in ["expected", "carried.0", "carried.1", "fresh.0", "fresh.1", "fresh.2"]}
        worst = 0.0
        for k, some in enumerate(sentences):
            states = elmo.zeros()
            with h5py.File(fixture / f"lm_embeddings_{k}.hdf5", "r") as file:
                for i, sentence in enumerate(some):
                    expected = np.concatenate(list(file[str(i)][...]), 1)
                    carried = elmo.layers(sentence, states)
                    fresh = elmo.layers(sentence, elmo.zeros())
                    worst = max(worst, abs(carried[2] - expected).max())
                    tensors["expected"].append(expected)
                    for layer in (0, 1):
                        # What states do not change, and a part of the rest, are enough.
                        tensors[f"carried.{layer}"].append(carried[layer] if i > 6 else carried[layer][:0])
                    for layer in (0, 1, 2):
                        tensors[f"fresh.{layer}"].append(fresh[layer] if i > 6 else fresh[layer][:0])
        print(f"{name}: the authors' numbers are off by at most {worst:.1e}")
        assert worst < 5e-6
        directory = Path(out) / name
        directory.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(fixture / "lm_weights.hdf5", directory / "lm_weights.hdf5")
        (directory / "options.json").write_text(json.dumps(elmo.options, indent=2) + "\n")
        (directory / "sentences.json").write_text(json.dumps(sentences, indent=1, ensure_ascii=False) + "\n")
        save_file({key: np.concatenate(x).astype(np.float32) for key, x in tensors.items()}, directory / "golden.safetensors")


if __name__ == "__main__":
    main(sys.argv[1:-1], sys.argv[-1])
