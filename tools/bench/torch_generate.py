"""`transformers` writing with GPT-2-small on a GPU: the peer of `henson bench generate --model gpt2`.

    python tools/bench/torch_generate.py --streams 16 [--prompt 32] [--new 128] [--rounds 3]

Random weights in bf16, prompts of random tokens, greedy, a static cache and the forward compiled with mode=reduce-overhead (what `generate`
does with a static cache), no end of sequence. A run is a whole call, from prompts to the last token. Prints one JSON line; the first calls, in
which everything is compiled, do not count. `--check` writes a few tokens with a tiny network on the CPU, uncompiled.
"""

import argparse
import json
import os
import statistics
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

flags = argparse.ArgumentParser()
for name, default in (("streams", 1), ("prompt", 32), ("new", 128), ("rounds", 3)):
    flags.add_argument("--" + name, type=int, default=default)
flags.add_argument("--check", action="store_true")
flags = flags.parse_args()
device = "cpu" if flags.check else "cuda"
torch.manual_seed(0)
torch.set_float32_matmul_precision("high")
tiny = dict(n_layer=2, n_embd=64, n_head=2, vocab_size=200) if flags.check else {}
if flags.check:
    flags.new, flags.rounds = 8, 1
config = transformers.GPT2Config(bos_token_id=None, eos_token_id=None, pad_token_id=None, **tiny)
model = transformers.GPT2LMHeadModel(config).to(device, torch.float32 if flags.check else torch.bfloat16).eval()
ids = torch.randint(0, config.vocab_size, (flags.streams, flags.prompt), device=device)
mask = torch.ones_like(ids)
settings = dict(max_new_tokens=flags.new, min_new_tokens=flags.new, do_sample=False, cache_implementation="static", use_cache=True)
# All prompts end at the same place, so what would fill up shorter ones is never written.
settings |= dict(eos_token_id=None, pad_token_id=0)
if not flags.check:
    settings["compile_config"] = transformers.CompileConfig(mode="reduce-overhead", fullgraph=False, dynamic=False)
sync = torch.cuda.synchronize if device == "cuda" else lambda: None


@torch.inference_mode()
def run():
    sync()
    start = time.perf_counter()
    out = model.generate(input_ids=ids, attention_mask=mask, **settings)
    sync()
    assert out.shape[1] == flags.prompt + flags.new, out.shape
    return time.perf_counter() - start


begun = time.perf_counter()
for _ in range(1 if flags.check else 3):
    run()
warm = time.perf_counter() - begun
seconds = statistics.median(run() for _ in range(flags.rounds))
print(json.dumps({
    "peer": "transformers", "mode": "generate", "model": "gpt2", "streams": flags.streams, "prompt": flags.prompt, "new_tokens": flags.new,
    "ms": round(seconds * 1e3, 2), "tokens_per_s": round(flags.streams * flags.new / seconds, 1), "warmup_s": round(warm, 1),
    "transformers": transformers.__version__,
}))
