"""Make tests-data/electra-joint: ten joint steps of an ELECTRA generator and discriminator over shared embeddings.

    HF_HUB_OFFLINE=1 python tools/golden/electra_joint.py [OUTPUT_DIR]

The two models are transformers' own, with one set of embeddings between them; draws are henson's, made here once more from
Philox's counters. config.json and model.safetensors are the discriminator's, those in generator/ the generator's, and
golden.safetensors holds

    input.original, input.ids, input.segments, input.offsets   the text, the same with masks, its segments and sequences
    input.rows, input.targets                                  places that were drawn, one of them twice, and what stood there
    steps.drawn                                                what the generator put there in each step (one for each place)
    steps.mlm_losses, steps.rtd_losses, steps.grad_norms       of each step, before its update
    grad.NAME, grad.generator.NAME                             gradients of the first step; tables have the first name alone
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import make_bert_golden as golden
import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

V, E, STEPS, SEED, SITE = 47, 8, 10, 9, 0xFE00
MASK, WEIGHT = 4, 50.0
LENGTHS = [9, 21, 14]


def philox(seed, counter):
    """Philox 4x32 with ten rounds."""
    c, key, low = list(counter), [seed & 0xFFFFFFFF, seed >> 32], 0xFFFFFFFF
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ key[0], b & low, (a >> 32) ^ c[3] ^ key[1], a & low]
        key = [(key[0] + 0x9E3779B9) & low, (key[1] + 0xBB67AE85) & low]
    return c


def draw(logits, sequence, position, step):
    """The class with the largest logit plus Gumbel noise; four classes share a counter."""
    groups = -(-V // 4)
    bits = [philox(SEED, [position * groups + c // 4, sequence, step, SITE])[c % 4] for c in range(V)]
    uniform = (np.array(bits, dtype=np.float64) + 0.5) / 2.0**32
    scores = logits.astype(np.float64) - np.log(-np.log(uniform))
    best, second = np.sort(scores)[::-1][:2]
    assert best - second > 1e-3, "too near to each other to be the same elsewhere"
    return int(scores.argmax())


def models():
    common = dict(vocab_size=V, embedding_size=E, max_position_embeddings=40, type_vocab_size=2, pad_token_id=None)
    common |= dict(attn_implementation="eager", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    sizes = lambda h, layers, heads, ffn: dict(
        hidden_size=h, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=ffn
    )
    config = transformers.ElectraConfig
    discriminator = transformers.ElectraForPreTraining(config(**common, **sizes(16, 2, 2, 32)))
    generator = transformers.ElectraForMaskedLM(config(**common, **sizes(12, 1, 2, 24)))
    for prefix, model in [("", discriminator), ("generator.", generator)]:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                noise = torch.randn(parameter.shape, generator=golden.generator(prefix + name))
                is_norm = name.endswith("LayerNorm.weight")
                parameter.copy_(1 + 0.2 * noise if is_norm else (0.1 if name.endswith("bias") else 0.2) * noise)
    generator.electra.embeddings = discriminator.electra.embeddings
    generator.generator_lm_head.weight = discriminator.electra.embeddings.word_embeddings.weight
    return discriminator, generator


def inputs():
    rng = golden.generator("electra-joint")
    total = sum(LENGTHS)
    data = {
        "original": torch.randint(5, V, (total,), generator=rng),
        "offsets": torch.tensor([0, *LENGTHS]).cumsum(0),
        "segments": torch.cat([(torch.arange(n) >= n // 2).long() for n in LENGTHS]),
    }
    rows = torch.randperm(total, generator=rng)[:8].sort().values
    ids = data["original"].clone()
    ids[rows[1:]] = MASK  # the first stays as it is
    data |= {"ids": ids, "rows": torch.cat([rows[:4], rows[3:]])}  # the fourth was drawn twice
    data["targets"] = data["original"][data["rows"]]
    return data


def main():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.utils.logging.set_verbosity_error()
    default = Path(__file__).resolve().parents[2] / "tests-data" / "electra-joint"
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else default
    discriminator, generator = models()
    discriminator.save_pretrained(root)
    generator.save_pretrained(root / "generator")
    data = inputs()
    offsets = data["offsets"].tolist()
    pad = lambda flat: golden.pad(flat, offsets, 0)
    real = pad(torch.ones_like(data["ids"]))
    places = data["rows"].unique().tolist()
    sequence_of = [next(i for i in range(len(LENGTHS)) if row < offsets[i + 1]) for row in places]

    named = dict(discriminator.named_parameters())
    shared = {id(p) for p in named.values()}
    named |= {f"generator.{n}": p for n, p in generator.named_parameters() if id(p) not in shared}
    groups = [
        {"params": [p for p in named.values() if p.dim() > 1], "weight_decay": 0.01},
        {"params": [p for p in named.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.999), eps=1e-6)
    call = {"attention_mask": real, "token_type_ids": pad(data["segments"])}
    out = {"drawn": [], "mlm_losses": [], "rtd_losses": [], "grad_norms": []}
    tensors = {f"input.{name}": value.contiguous() for name, value in data.items()}
    for step in range(STEPS):
        logits = generator(input_ids=pad(data["ids"]), **call).logits[real.bool()]
        mlm = cross_entropy(logits[data["rows"]], data["targets"])
        drawn = [
            draw(logits[row].detach().numpy(), sequence, row - offsets[sequence], step)
            for row, sequence in zip(places, sequence_of)
        ]
        corrupted = data["original"].clone()
        corrupted[places] = torch.tensor(drawn)
        labels = (corrupted != data["original"]).float()
        found = discriminator(input_ids=pad(corrupted), **call).logits[real.bool()]
        rtd = binary_cross_entropy_with_logits(found, labels)
        optimizer.zero_grad()
        (mlm + WEIGHT * rtd).backward()
        if step == 0:
            tensors |= {f"grad.{name}": p.grad.clone() for name, p in named.items()}
        out["grad_norms"].append(torch.nn.utils.clip_grad_norm_(named.values(), 1.0))
        optimizer.step()
        out["drawn"].append(torch.tensor(drawn))
        out["mlm_losses"].append(mlm.detach())
        out["rtd_losses"].append(rtd.detach())
        print(step, float(mlm), float(rtd), float(out["grad_norms"][-1]), int(labels.sum()))
    tensors |= {f"steps.{name}": torch.stack(values) for name, values in out.items()}
    save_file(tensors, root / "golden.safetensors")


if __name__ == "__main__":
    main()
