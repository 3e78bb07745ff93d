"""Golden values of generation: longer texts of tiny models, and what logits processors make of fixed scores, ties among them.

    python tools/golden/generation.py tests-data/generation

Models are random: their matrices are multiplied, so that the best token is clearly the best, and every vector gets noise. A search whose
result changes with the sixth digit of the weights decides between equals, and is left out. Made with transformers 5.22.2 and torch 2.15.0
on one thread.
"""

import copy
import json
import os
import sys

import torch
import transformers as t

torch.set_num_threads(1)
t.logging.set_verbosity_error()
NEW = 64
SOURCES = [[5, 6, 7, 8, 9, 10, 11, 2], [12, 13, 14, 2], [30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 2]]
special = dict(vocab_size=64, bos_token_id=1, eos_token_id=2, pad_token_id=0)


def models():
    yield "gpt2", t.GPT2LMHeadModel, t.GPT2Config(n_positions=96, n_embd=16, n_layer=2, n_head=2, n_inner=32, tie_word_embeddings=False, **special)
    yield "t5", t.T5ForConditionalGeneration, t.T5Config(
        d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, relative_attention_num_buckets=8,
        relative_attention_max_distance=20, decoder_start_token_id=0, tie_word_embeddings=False, **special,
    )  # fmt: skip
    yield "bart", t.BartForConditionalGeneration, t.BartConfig(
        d_model=16, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32,
        decoder_ffn_dim=32, max_position_embeddings=96, decoder_start_token_id=2, forced_eos_token_id=None, **special,
    )  # fmt: skip


def settings(ends):
    """In transformers' words."""
    end, other = ends
    return {
        "greedy": dict(),
        "greedy penalty": dict(repetition_penalty=1.15),
        "greedy no repeat": dict(no_repeat_ngram_size=3, eos_token_id=end),
        "greedy least": dict(min_new_tokens=30, eos_token_id=[end, other]),
        "greedy bias": dict(sequence_bias=[[[end], -3.0], [[other], 2.5]], repetition_penalty=1.3, min_length=40, eos_token_id=end),
        "beams": dict(num_beams=4, num_return_sequences=4, eos_token_id=end),
        "beams short": dict(num_beams=3, num_return_sequences=2, length_penalty=0.4, eos_token_id=[end, other]),
        "beams long": dict(num_beams=4, num_return_sequences=4, length_penalty=2.0, early_stopping="never", eos_token_id=end, no_repeat_ngram_size=2),
        "beams early": dict(num_beams=5, num_return_sequences=3, early_stopping=True, eos_token_id=[end, other], min_new_tokens=9),
        "beams penalty": dict(num_beams=3, num_return_sequences=3, repetition_penalty=1.4, length_penalty=-1.0, eos_token_id=end),
        "beams forced": dict(num_beams=3, num_return_sequences=3, forced_bos_token_id=other, forced_eos_token_id=end, no_repeat_ngram_size=3),
    }


def main(out):
    for name, kind, config in models():
        torch.manual_seed(1)
        model = kind(config).eval()
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
                elif key.startswith(("lm_head", "transformer.wpe", "model.decoder.embed_positions")):
                    parameter.normal_()
                elif parameter.std() < 0.3:
                    parameter.mul_(20 if "layers" in key else 8)
            if name == "t5":
                # Tied by default, whatever the config says.
                model.lm_head.weight = torch.nn.Parameter(torch.randn(64, 16))
        directory = os.path.join(out, name)
        model.save_pretrained(directory)
        for file in os.listdir(directory):
            if file not in ("config.json", "model.safetensors"):
                os.remove(os.path.join(directory, file))
        others = [copy.deepcopy(model) for _ in range(6)]
        with torch.no_grad():
            for other in others:
                for parameter in other.parameters():
                    parameter.mul_(1 + 2e-6 * torch.randn_like(parameter))
        cases = []
        for source in SOURCES:
            ids = torch.tensor([source])
            begun = 1 if config.is_encoder_decoder else len(source)
            free = model.generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None, repetition_penalty=1.1)[0, begun:].tolist()
            # Ends that come in the middle and late.
            ends = free[20], next((i for i in free[41:] + free if i != free[20]), 9)
            case = {"source": source, "ends": ends, "generated": []}
            for tag, keys in settings(ends).items():
                keys = {"eos_token_id": None, **keys}
                write = lambda m: m.generate(ids, max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True, output_scores=True, **keys)
                done = write(model)
                if any(write(other).sequences.tolist() != done.sequences.tolist() for other in others):
                    print("left out:", name, source, tag)
                    continue
                scores = getattr(done, "sequences_scores", None)
                rows = [row[begun:] for row in done.sequences.tolist()]
                case["generated"].append(dict(tag=tag, keys=keys, ids=rows, scores=None if scores is None else scores.tolist()))
            cases.append(case)
        with open(os.path.join(directory, "golden.json"), "w") as file:
            json.dump({"new_tokens": NEW, "cases": cases}, file)
            file.write("\n")
    with open(os.path.join(out, "processors.json"), "w") as file:
        json.dump(processors(), file)
        file.write("\n")


def processors():
    """What each processor, and some in a row, make of scores; a banned score is null."""
    inf = float("inf")
    rows = {
        "ties": [1.0, 2.0, 2.0, -1.0, 2.0, 0.5, -1.0, 0.5, 0.0, -3.0],
        "equal": [0.25] * 10,
        "mixed": [3.1, -0.7, 2.9, 0.0, -2.2, 1.4, 3.1, -5.0, 0.3, 1.4],
        "steep": [9.0, 1.0, 0.0, -1.0, 8.5, -2.0, -30.0, 2.0, 8.5, 3.0],
        "banned": [-inf, 1.0, -inf, 0.5, 0.5, -inf, 2.0, -1.0, 0.0, 0.0],
    }
    tokens = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 1, 4]
    ids = torch.tensor([tokens])
    make = {
        "repetition_penalty": lambda p: t.RepetitionPenaltyLogitsProcessor(p),
        "no_repeat_ngram": lambda n: t.NoRepeatNGramLogitsProcessor(n),
        "logit_bias": lambda pairs: t.SequenceBiasLogitsProcessor({(i,): b for i, b in pairs}),
        "min_length": lambda n: t.MinLengthLogitsProcessor(n, torch.tensor([4, 8])),
        "min_new_tokens": lambda n: t.MinNewTokensLengthLogitsProcessor(8, n, torch.tensor([4, 8])),
        "forced_last": lambda i: t.ForcedEOSTokenLogitsProcessor(13, torch.tensor([i])),
        "temperature": lambda x: t.TemperatureLogitsWarper(x),
        "top_k": lambda k: t.TopKLogitsWarper(k),
        "top_p": lambda p: t.TopPLogitsWarper(p),
        "min_p": lambda p: t.MinPLogitsWarper(p),
    }
    chains = [[[name, value]] for name, values in {
        "repetition_penalty": [1.3, 0.8], "no_repeat_ngram": [1, 2, 3, 4], "logit_bias": [[[1, 5.0], [7, -2.5], [9, 0.5]]],
        "min_length": [12, 13], "min_new_tokens": [4, 5], "forced_last": [7], "temperature": [0.5, 2.0],
        "top_k": [1, 2, 3, 5, 10, 40], "top_p": [0.05, 0.3, 0.5, 0.6, 0.75, 0.9, 0.99], "min_p": [0.0625, 0.13, 0.5, 1.0],
    }.items() for value in values]  # fmt: skip
    chains += [
        [["logit_bias", [[1, 5.0], [7, -2.5]]], ["repetition_penalty", 1.3], ["no_repeat_ngram", 2], ["min_length", 13]],
        [["temperature", 0.7], ["top_k", 4], ["top_p", 0.8], ["min_p", 0.1]],
        [["repetition_penalty", 1.2], ["temperature", 1.7], ["top_k", 6], ["top_p", 0.6]],
        [["no_repeat_ngram", 3], ["forced_last", 2], ["top_k", 3]],
    ]
    cases = []
    for name, row in rows.items():
        for chain in chains:
            scores = torch.tensor([row])
            for processor, value in chain:
                scores = make[processor](value)(ids, scores.clone())
            expected = [None if x == -inf else x for x in scores[0].tolist()]
            cases.append(dict(row=name, chain=chain, expected=expected))
    rows = {name: [None if x == -inf else x for x in row] for name, row in rows.items()}
    return {"tokens": tokens, "first": 8, "limit": 13, "end": [4, 8], "rows": rows, "cases": cases}


if __name__ == "__main__":
    main(sys.argv[1])
