"""Make tests-data/writers: tiny models that write, with what transformers' `generate` gives under eight settings.

    HF_HUB_OFFLINE=1 python tools/golden/make_writers.py [OUTPUT_DIR [FAMILY...]]

One directory per family: config.json, model.safetensors and generation_config.json from save_pretrained, and golden.json with
hidden states, logits, loss and generations for two inputs of unequal length. Of encoder-decoders, the last states of both stacks.
Numbers have seven digits.
"""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers as hf

SOURCES = [[5, 6, 7, 8, 9, 10, 11, 2], [12, 13, 14, 2]]
TARGETS = [[20, 21, 22, 23, 24, 2], [30, 31, 2]]
PROMPT, NEW = 4, 12  # tokens of a prompt, and that are written
GPT = {"n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
T5 = {
    "d_model": 16, "d_kv": 6, "d_ff": 32, "num_heads": 2, "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 2,
}
BART = {
    "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 32, "pad_token_id": 1, "bos_token_id": 0,
    "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None,
}
MARIAN = BART | {
    "decoder_vocab_size": 60, "pad_token_id": 59, "decoder_start_token_id": 59, "scale_embedding": True, "activation_function": "swish",
}
FAMILIES = {
    "openai-gpt": (hf.OpenAIGPTLMHeadModel, hf.OpenAIGPTConfig, GPT),
    "gpt2": (hf.GPT2LMHeadModel, hf.GPT2Config, GPT),
    "gpt2-scaled": (hf.GPT2LMHeadModel, hf.GPT2Config, GPT | {"n_inner": 40, "scale_attn_by_inverse_layer_idx": True}),
    # transformers 5.22 fails in cached generation where the decoder has more layers than the encoder.
    "t5": (hf.T5ForConditionalGeneration, hf.T5Config, T5 | {"num_layers": 3, "num_decoder_layers": 2}),
    "t5-v1_1": (
        hf.T5ForConditionalGeneration,
        hf.T5Config,
        T5 | {"num_layers": 2, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "bart": (hf.BartForConditionalGeneration, hf.BartConfig, BART),
    "marian": (hf.MarianMTModel, hf.MarianConfig, MARIAN),
}
SETTINGS = {
    "greedy": {},
    "beam3": {"num_beams": 3},
    "beam3_lp0.6": {"num_beams": 3, "length_penalty": 0.6},
    "beam3_lp2_early": {"num_beams": 3, "length_penalty": 2.0, "early_stopping": True},
    "beam3_never": {"num_beams": 3, "length_penalty": 2.0, "early_stopping": "never"},
    "beam4_norepeat2_min6": {"num_beams": 4, "no_repeat_ngram_size": 2, "min_new_tokens": 6},
    "greedy_rep1.3": {"repetition_penalty": 1.3},
    "beam3_forced": {"num_beams": 3, "forced_bos_token_id": 7, "forced_eos_token_id": 3},
}


def make_model(family):
    kind, config, settings = FAMILIES[family]
    torch.manual_seed(0)
    model = kind(config(vocab_size=60, **settings)).eval()
    with torch.no_grad():
        # Every parameter matters, and the best token is well ahead of the next.
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif family != "t5" or not name.startswith(("shared", "lm_head")):
                parameter.mul_(4 if parameter.std() < 0.3 else 1)
        if family == "t5-v1_1":
            model.lm_head.weight = torch.nn.Parameter(torch.randn(60, 16))
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_(0, 0.1)
    return model


def rounded(tensor):
    return [float("%.7g" % x) for x in tensor.double().flatten().tolist()]


def generations(model, prompt, first):
    """Under each setting, with an end token that really occurs: the most frequent one behind the third new token."""
    write = lambda end, **more: model.generate(prompt, max_new_tokens=NEW, do_sample=False, eos_token_id=end, **more)
    free = [write(59, num_beams=beams)[0].tolist() for beams in (1, 3)]
    tail = [token for ids in free for token in ids[first + 3 :]]
    out = {"eos": max(set(tail), key=tail.count)}
    for name, setting in SETTINGS.items():
        written = write(out["eos"], return_dict_in_generate=True, output_scores=True, **setting)
        out[name] = {"ids": written.sequences[0].tolist()}
        if getattr(written, "sequences_scores", None) is not None:
            out[name]["score"] = float(written.sequences_scores[0])
    return out


@torch.no_grad()
def case(model, source, target):
    source, target = torch.tensor([source]), torch.tensor([target])
    if model.config.is_encoder_decoder:
        out = model(input_ids=source, labels=target, output_hidden_states=True)
        found = {"encoder": rounded(out.encoder_last_hidden_state), "decoder_last": rounded(out.decoder_hidden_states[-1])}
        prompt, first = source, 1
    else:
        out = model(source, labels=source, output_hidden_states=True)
        found = {"hidden": [rounded(state) for state in out.hidden_states]}
        prompt, first = source[:, :PROMPT], PROMPT
    found |= {"logits": rounded(out.logits), "shape": list(out.logits.shape[1:]), "loss": float(out.loss)}
    return found | {"generate": generations(model, prompt, first)}


def main():
    torch.set_num_threads(1)
    hf.logging.set_verbosity_error()
    hf.utils.logging.disable_progress_bar()
    default = Path(__file__).resolve().parents[2] / "tests-data" / "writers"
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else default
    for family in sys.argv[2:] or FAMILIES:
        model = make_model(family)
        model.save_pretrained(root / family)
        cases = [case(model, source, target) for source, target in zip(SOURCES, TARGETS)]
        golden = {"inputs": SOURCES, "targets": TARGETS, "cases": cases}
        (root / family / "golden.json").write_text(json.dumps(golden))
        print(family, cases[0]["loss"], cases[0]["generate"]["beam3"]["ids"])


if __name__ == "__main__":
    main()
