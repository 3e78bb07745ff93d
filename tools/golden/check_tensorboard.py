"""Check that TensorBoard reads what henson wrote: the event files of a run say what its metrics.jsonl says.

    python tools/golden/check_tensorboard.py RUN

RUN holds metrics.jsonl and tensorboard/. Every number of the log must be there, in single precision, under
its tag and step, and nothing else; the same holds for the texts of samples and notes. A run that was
resumed counts as one: what the log dropped, TensorBoard must have dropped too. Needs `pip install tensorboard`.
"""

import html
import json
import math
import re
import struct
import sys
from pathlib import Path

from tensorboard.backend.event_processing import event_accumulator, plugin_event_accumulator

TRAIN = ["loss", "mlm_loss", "nsp_loss", "learning_rate", "gradient_norm", "tokens_per_s"]


def single(number):
    """As single precision; what is not finite stands as null in the log."""
    return math.nan if number is None else struct.unpack("f", struct.pack("f", number))[0]


def expected(log):
    scalars, texts = {}, {}
    for text in log.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        step = line["step"]
        if line["kind"] == "train":
            # A part of the loss that is null is not there; another null is a number that is not finite.
            optional = ["mlm_loss", "nsp_loss"]
            for name in TRAIN:
                if name in line and not (name in optional and line[name] is None):
                    scalars.setdefault(f"train/{name}", []).append((step, single(line[name])))
        elif line["kind"] == "eval":
            for name, number in line["metrics"].items():
                scalars.setdefault(f"eval/{name}", []).append((step, single(number)))
        elif line["kind"] == "samples":
            blanks = sum(len(sample["blanks"]) for sample in line["texts"])
            texts.setdefault("samples", []).append((step, 2 + blanks))  # lines of a table and its head
        else:
            texts.setdefault("notes", []).append((step, line["text"]))
    return scalars, texts


def same(a, b):
    return len(a) == len(b) and all(
        i == j and (x == y or (not math.isfinite(x) and not math.isfinite(y))) for (i, x), (j, y) in zip(a, b)
    )


def main():
    run = Path(sys.argv[1])
    scalars, texts = expected(run / "metrics.jsonl")
    # Scripts read event files with the first. The web page has the second: only it knows that texts can be void.
    directory, all_of_them = str(run / "tensorboard"), {"text": 0, "scalars": 0}
    events = event_accumulator.EventAccumulator(directory, size_guidance={"scalars": 0})
    page = plugin_event_accumulator.EventAccumulator(directory, tensor_size_guidance=all_of_them)
    events.Reload()
    page.Reload()
    tags, shown = set(events.Tags()["scalars"]), set(page.Tags()["tensors"])
    if tags != set(scalars) or shown != set(scalars) | set(texts):
        sys.exit(f"FAIL: other tags: {sorted(tags)}, {sorted(shown)}; expected {sorted(scalars)}, {sorted(texts)}")
    for tag, numbers in scalars.items():
        got = [(event.step, event.value) for event in events.Scalars(tag)]
        if not same(got, numbers):
            sys.exit(f"FAIL: {tag}: {len(got)} numbers differ from the {len(numbers)} of the log")
        if [event.step for event in page.Tensors(tag)] != [step for step, _ in numbers]:
            sys.exit(f"FAIL: {tag}: the page shows other steps than the log")
    for tag, lines in texts.items():
        plugin = page.SummaryMetadata(tag).plugin_data.plugin_name
        if plugin != "text":
            sys.exit(f"FAIL: {tag} belongs to the plugin {plugin!r}")
        got = [(event.step, event.tensor_proto.string_val[0].decode()) for event in page.Tensors(tag)]
        if tag == "samples":
            got = [(step, text.count("\n")) for step, text in got]
        else:
            got = [(step, html.unescape(re.sub(r"\\(.)", r"\1", text))) for step, text in got]
        if got != lines:
            sys.exit(f"FAIL: {tag}: {got} is not {lines}")
    numbers, pieces = (sum(map(len, values.values())) for values in (scalars, texts))
    print(f"ok: {numbers} numbers under {len(scalars)} tags, {pieces} texts")


if __name__ == "__main__":
    main()
