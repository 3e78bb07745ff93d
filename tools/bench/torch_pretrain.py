"""PyTorch pre-training a BERT on the very batches of `henson data export`: the peer of `henson pretrain`, for loss and time.

    henson data export shards --out batches.safetensors --objective mlm --batches 2500 --batch-size 256 --mask-probability 0.2
    python tools/bench/torch_pretrain.py --peer torch_bert.py --batches batches.safetensors --tokenizer DIR --out DIR \
        --layers 12 --hidden 256 --lr 2e-3 --warmup 250 [--dropout 0.0] [--init 0.04] [--beta2 0.98] [--start DIR]

The model is that of a script with torch_bert.py's classes (--peer): fused QKV, scaled_dot_product_attention, the vocabulary at
the hidden pieces alone, bf16 autocast, torch.compile, fused AdamW. Sequences are padded to one length and hidden pieces to one
number, so that nothing is compiled twice. AdamW, clipping and schedule are those of a recipe. Weights start as the recipe's do,
truncated at two deviations, or are those of a model directory (--start). Writes a model directory that `henson eval` scores with
the mean losses of every 100 steps (losses.json), and prints one JSON line. Its `seconds` are those of the training loop after the
first 20 steps, scaled to all: compiling does not count.
"""

import argparse
import json
import pathlib
import shutil
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file

from peer import load


def read(path, length, hidden):
    """Batches as pinned tensors of one shape: ids, mask, places of the hidden pieces, what they are."""
    with safe_open(path, "pt") as file:
        count = sum(key.endswith(".input_ids") for key in file.keys())
        digits = max(len(str(count - 1)), 4)
        for number in range(count):
            get = lambda name: file.get_tensor(f"batch.{number:0{digits}}.{name}")
            wide = lambda value, fill: F.pad(value, (0, length - value.shape[1]), value=fill)
            labels = wide(get("labels"), -100).reshape(-1)
            rows = (labels != -100).nonzero()[:, 0]
            lacking = hidden - len(rows)
            yield (
                wide(get("input_ids"), 0).int().pin_memory(), wide(get("attention_mask"), 0).bool().pin_memory(),
                F.pad(rows, (0, lacking)).pin_memory(), F.pad(labels[rows], (0, lacking), value=-100).pin_memory(),
            )


def names(model):
    """The weights, or views of them, under the names that transformers has in BertForMaskedLM."""
    tensors = {
        "bert.embeddings.word_embeddings.weight": model.tok.weight,
        "bert.embeddings.position_embeddings.weight": model.pos.weight,
        "bert.embeddings.token_type_embeddings.weight": model.seg.weight,
        "cls.predictions.bias": model.bias,
    }
    linear = {"cls.predictions.transform.dense": model.dense}
    norms = {"bert.embeddings.LayerNorm": model.ln, "cls.predictions.transform.LayerNorm": model.ln_head}
    for i, layer in enumerate(model.layers):
        name = f"bert.encoder.layer.{i}."
        for part, weight, bias in zip(("query", "key", "value"), layer.qkv.weight.chunk(3), layer.qkv.bias.chunk(3)):
            tensors[f"{name}attention.self.{part}.weight"] = weight
            tensors[f"{name}attention.self.{part}.bias"] = bias
        linear |= {name + "attention.output.dense": layer.out, name + "intermediate.dense": layer.up, name + "output.dense": layer.down}
        norms |= {name + "attention.output.LayerNorm": layer.ln1, name + "output.LayerNorm": layer.ln2}
    for name, module in (linear | norms).items():
        tensors[name + ".weight"], tensors[name + ".bias"] = module.weight, module.bias
    return tensors


def main():
    flags = argparse.ArgumentParser()
    for name in ("peer", "batches", "tokenizer", "out"):
        flags.add_argument("--" + name, required=True)
    for name, default in (("layers", 12), ("hidden", 256), ("length", 128), ("warmup", 250), ("seed", 0)):
        flags.add_argument("--" + name, type=int, default=default)
    for name, default in (("lr", 2e-3), ("dropout", 0.0), ("init", 0.04), ("beta2", 0.98), ("decay", 0.01), ("share", 0.2)):
        flags.add_argument("--" + name, type=float, default=default)
    flags.add_argument("--start")
    flags = flags.parse_args()
    peer = load(flags.peer)
    torch.manual_seed(flags.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    tokenizer = json.loads((pathlib.Path(flags.tokenizer) / "tokenizer.json").read_text())
    pieces = len(tokenizer["model"]["vocab"])
    with safe_open(flags.batches, "pt") as file:
        size = file.get_slice("batch.0000.input_ids").get_shape()[0]
    batches = list(read(flags.batches, flags.length, size * (round(flags.length * flags.share) + 1)))
    model = peer.Bert(flags.layers, flags.hidden, flags.hidden // 64, V=pieces, p=flags.dropout)
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.trunc_normal_(module.weight, std=flags.init, a=-2 * flags.init, b=2 * flags.init)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
    del model.pool, model.nsp
    if flags.start:
        with torch.no_grad(), safe_open(pathlib.Path(flags.start) / "model.safetensors", "pt") as file:
            for name, tensor in names(model).items():
                tensor.copy_(file.get_tensor(name))
    model = model.cuda().train()

    def loss_of(ids, mask, rows, targets):
        x = model.tok(ids) + model.pos.weight[: ids.shape[1]] + model.seg.weight[0]
        x = F.dropout(model.ln(x), model.p, True)
        B, S, H = x.shape
        for layer in model.layers:
            q, k, v = layer.qkv(x).view(B, S, 3, layer.A, H // layer.A).permute(2, 0, 3, 1, 4)
            a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :], dropout_p=layer.p)
            x = layer.ln1(x + F.dropout(layer.out(a.transpose(1, 2).reshape(B, S, H)), layer.p, True))
            x = layer.ln2(x + F.dropout(layer.down(F.gelu(layer.up(x))), layer.p, True))
        h = model.ln_head(F.gelu(model.dense(x.reshape(-1, H)[rows])))
        return F.cross_entropy(F.linear(h, model.tok.weight, model.bias).float(), targets, ignore_index=-100)

    compiled = torch.compile(loss_of)
    plain = [p for n, p in model.named_parameters() if p.dim() == 1]
    decayed = [p for n, p in model.named_parameters() if p.dim() > 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": flags.decay}, {"params": plain, "weight_decay": 0.0}],
        lr=flags.lr, betas=(0.9, flags.beta2), eps=1e-6, fused=True,
    )
    steps, skip = len(batches), 20
    rate = lambda step: min(step / flags.warmup, (steps - step) / (steps - flags.warmup))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    losses = []
    for step, batch in enumerate(batches):
        if step == skip:
            torch.cuda.synchronize()
            start = time.perf_counter()
        batch = [part.cuda(non_blocking=True) for part in batch]
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = compiled(*batch)
        loss.backward()
        losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) * steps / (steps - skip)
    out = pathlib.Path(flags.out)
    shutil.copytree(flags.tokenizer, out, dirs_exist_ok=True)
    (out / "losses.json").write_text(json.dumps([part.mean().item() for part in torch.stack(losses).split(100)]))
    tensors = {name: tensor.detach().float().cpu().contiguous() for name, tensor in names(model).items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps({
        "architectures": ["BertForMaskedLM"], "model_type": "bert", "vocab_size": pieces, "hidden_size": flags.hidden,
        "num_hidden_layers": flags.layers, "num_attention_heads": flags.hidden // 64, "intermediate_size": 4 * flags.hidden,
        "hidden_act": "gelu", "hidden_dropout_prob": flags.dropout, "attention_probs_dropout_prob": flags.dropout,
        "max_position_embeddings": 512, "type_vocab_size": 2, "initializer_range": flags.init, "layer_norm_eps": 1e-12,
        "pad_token_id": 0,
    }, indent=2))
    print(json.dumps({"peer": "torch", "steps": steps, "seconds": round(seconds, 1), "last_loss": round(loss.item(), 4)}))


main()
