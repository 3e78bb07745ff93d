"""Make tests-data/torch-files: small files of torch.save in both forms, for the reader in crates/checkpoint.

    python tools/golden/make_torch_files.py [OUTPUT_DIR]

Numbers follow a rule, so that tests need no second file: element i of a tensor, in the order of its shape, is i / 2 - 1
for floats, i - 1 for signed integers, i for bytes, and i odd for truth values.
"""

import sys
from collections import OrderedDict
from pathlib import Path

import torch

FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8]


def numbers(shape, dtype=torch.float32):
    count = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    if dtype in FLOATS:
        count = count / 2 - 1
    elif dtype in INTEGERS:
        count = count - 1
    elif dtype == torch.bool:
        count = count % 2
    return count.to(dtype).reshape(shape)


def tensors():
    state = OrderedDict()
    for dtype in [*FLOATS, *INTEGERS, torch.uint8, torch.bool]:
        state[str(dtype).removeprefix("torch.")] = numbers((2, 3), dtype)
    state["scalar"] = numbers(())
    state["empty"] = numbers((0, 3))
    # Two names of one storage, as tied weights are.
    state["tied"] = state["float32"]
    # Each of these has the numbers of the rule in the order of its shape, and others in its storage.
    state["transposed"] = numbers((3, 4)).t().contiguous().t()
    state["permuted"] = numbers((2, 3, 4), torch.float16).permute(2, 0, 1).contiguous().permute(1, 2, 0)
    wide = torch.full((4, 5), 77.0)
    wide[1:3, 1:4] = numbers((2, 3))
    state["window"] = wide[1:3, 1:4]
    state["rows"] = torch.cat([torch.full((2, 3), 77.0), numbers((2, 3))])[2:]
    state["columns"] = torch.stack([numbers((5,)), torch.full((5,), 77.0)], 1)[:, 0]
    state["position_ids"] = numbers((4,), torch.int64).expand((1, -1))
    state["parameter"] = torch.nn.Parameter(numbers((2, 3)))
    # What state_dict() of a module sets.
    state._metadata = OrderedDict([("", {"version": 1}), ("layer", {"version": 1})])
    return state


def main():
    here = Path(__file__).resolve().parent.parent.parent
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else here / "tests-data" / "torch-files"
    out.mkdir(parents=True, exist_ok=True)
    plain = {"a": numbers((2, 3)), "b": numbers((4,), torch.float16)}
    training = {"epoch": 3, "loss": 0.5, "model": {"module": plain}, "history": [1, None, (2, 3, 4)], "step": torch.tensor(7)}
    expanded = {"a": torch.ones(1).expand(3, 4)}
    for name, value in {"state": tensors(), "training": training, "plain": plain, "expanded": expanded}.items():
        torch.save(value, out / f"{name}-zip.bin")
        torch.save(value, out / f"{name}-legacy.bin", _use_new_zipfile_serialization=False)


if __name__ == "__main__":
    main()
