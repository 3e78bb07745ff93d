"""Decoding on a CPU: henson beside CTranslate2, the same random weights, prompts and numbers of new tokens, in alternation.

    python tools/bench/compare_generate.py --henson target/release/henson --work DIR [--model gpt2|t5] [--streams 1,16,64] [--rounds 3]

DIR keeps the model directories, which are made once (random weights of GPT-2-small or T5-small; the vocabulary is made up, since no
text is read: prompts are token ids). There is no end of sequence: every stream writes --new tokens. Prompts have unequal lengths from
8 to 64 tokens; with one stream 32. Printed: tokens/s as medians of the rounds, the ratio to CTranslate2's f32, and bytes of weights read a
second beside what this machine reads. Needs torch, transformers and ctranslate2.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time


def make(name, work):
    """A model directory of `transformers` with random weights and a tokenizer of made-up words, and CTranslate2's of it."""
    import ctranslate2
    import torch
    import transformers
    from tokenizers import Tokenizer, models

    torch.manual_seed(0)
    source = os.path.join(work, name)
    if not os.path.exists(source):
        if name == "gpt2":
            config = transformers.GPT2Config()
            model, end = transformers.GPT2LMHeadModel(config), "<|endoftext|>"
        else:
            config = transformers.T5Config(vocab_size=32128)
            model, end = transformers.T5ForConditionalGeneration(config), "</s>"
        size = config.vocab_size
        words = {f"w{i}": i for i in range(size)}
        for token, i in {"gpt2": {end: size - 1}, "t5": {"<pad>": 0, end: 1, "<unk>": 2}}[name].items():
            del words[f"w{i}"]
            words[token] = i
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>" if name == "t5" else end))
        fast = transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, bos_token=end, eos_token=end, unk_token="<unk>" if name == "t5" else end, pad_token="<pad>" if name == "t5" else end
        )
        model.save_pretrained(source)
        fast.save_pretrained(source)
    for kind in ["float32", "int8"]:
        target = os.path.join(work, f"{name}-ct2-{kind}")
        if not os.path.exists(target):
            converter = ctranslate2.converters.TransformersConverter(source)
            converter.convert(target, quantization=kind)
    return source


def prompts(streams, size):
    draw = random.Random(1)
    lengths = [32] if streams == 1 else [draw.randrange(8, 65) for _ in range(streams)]
    return [[draw.randrange(10, size - 10) for _ in range(length)] for length in lengths]


def peer(name, work, kind, ids, new, threads):
    """CTranslate2 in a process of its own: in one that has loaded torch, its threads wait for those of another OpenMP."""
    flags = ["--work", work, "--model", name, "--new", str(new), "--threads", str(threads), "--peer", kind]
    child = subprocess.Popen([sys.executable, __file__, "--henson", "-", *flags], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    print(json.dumps(ids), file=child.stdin, flush=True)

    def timed():
        print("again", file=child.stdin, flush=True)
        return float(child.stdout.readline())

    return timed


def run_peer(name, work, kind, new, threads):
    """What the process of the peer does: prompts from the first line, then a run for every other line."""
    import ctranslate2

    ids = json.loads(sys.stdin.readline())
    directory = os.path.join(work, f"{name}-ct2-{kind}")
    texts = [[f"w{i}" for i in row] for row in ids]
    common = dict(device="cpu", compute_type=kind, inter_threads=1, intra_threads=threads)
    if name == "gpt2":
        generator = ctranslate2.Generator(directory, **common)
        run = lambda: generator.generate_batch(
            texts, max_length=new, min_length=new, sampling_topk=1, include_prompt_in_result=False, max_batch_size=0
        )
    else:
        translator = ctranslate2.Translator(directory, **common)
        run = lambda: translator.translate_batch(texts, max_decoding_length=new, min_decoding_length=new, beam_size=1, max_batch_size=0)
    run()
    for _ in sys.stdin:
        start = time.perf_counter()
        run()
        print(len(ids) * new / (time.perf_counter() - start), flush=True)


def own(henson, source, dtype, ids, new, threads, work):
    file = os.path.join(work, f"prompts-{len(ids)}.txt")
    with open(file, "w") as out:
        out.writelines(" ".join(map(str, row)) + "\n" for row in ids)
    command = [henson, "bench", "generate", "--model", source, "--prompts", file, "--new-tokens", str(new), "--dtype", dtype, "--threads", str(threads), "--json"]

    def timed():
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        return json.loads(result.stdout.strip().splitlines()[-1])["tokens_per_s"]

    return timed


def bandwidth(threads):
    """Bytes a second that sums over large arrays read, the best of some."""
    from concurrent.futures import ThreadPoolExecutor

    import numpy

    arrays = [numpy.ones(1 << 26, dtype=numpy.float32) for _ in range(threads)]
    best = 0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(8):
            start = time.perf_counter()
            list(pool.map(numpy.sum, arrays))
            best = max(best, threads * arrays[0].nbytes / (time.perf_counter() - start))
    return best


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--henson", required=True)
    parser.add_argument("--work", required=True)
    parser.add_argument("--model", default="gpt2", choices=["gpt2", "t5"])
    parser.add_argument("--streams", default="1,16,64")
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--peer", help="what this script starts itself with, for CTranslate2's own process")
    args = parser.parse_args()
    if args.peer:
        return run_peer(args.model, args.work, args.peer, args.new, args.threads)
    source = make(args.model, args.work)
    with open(os.path.join(source, "config.json")) as file:
        size = json.load(file)["vocab_size"]
    read = bandwidth(args.threads)
    weights = os.path.getsize(os.path.join(source, "model.safetensors"))
    print(f"reads {read / 1e9:.1f} GB/s with {args.threads} threads; the weights are {weights / 1e6:.0f} MB in f32")
    for streams in map(int, args.streams.split(",")):
        ids = prompts(streams, size)
        sides = {
            "henson f32": own(args.henson, source, "f32", ids, args.new, args.threads, args.work),
            "henson bf16": own(args.henson, source, "bf16", ids, args.new, args.threads, args.work),
            "CTranslate2 f32": peer(args.model, args.work, "float32", ids, args.new, args.threads),
            "CTranslate2 int8": peer(args.model, args.work, "int8", ids, args.new, args.threads),
        }
        found = {name: [] for name in sides}
        for _ in range(args.rounds):
            for name, timed in sides.items():
                found[name].append(timed())
        medians = {name: statistics.median(values) for name, values in found.items()}
        base = medians["CTranslate2 f32"]
        for name, median in medians.items():
            share = median * weights / (2 if "bf16" in name else 1) / read if streams == 1 and "int8" not in name else None
            note = f", {share:.0%} of the read bandwidth" if share else ""
            print(f"{args.model} {streams:3} streams  {name:16} {median:9.1f} tokens/s  {median / base:.2f}x{note}")


if __name__ == "__main__":
    main()
