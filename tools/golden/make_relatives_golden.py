"""Make tests-data/relatives-golden: BERT's encoder relatives under every head, with transformers' own numbers.

    HF_HUB_OFFLINE=1 python tools/golden/make_relatives_golden.py [OUTPUT_DIR [FAMILY...]]

The same files as make_bert_golden.py makes for BERT, one directory per family and head; README.md beside this script
says what each tensor is.
"""

import shutil
import sys
from pathlib import Path

import make_bert_golden as golden
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file

# Smaller than BERT's: every mistake shows in these, too, and there are many of them.
golden.VOCAB, golden.HIDDEN, golden.HEADS = 47, 16, 2
HEADS = {
    "model": ("Model", {}),
    "mlm": ("ForMaskedLM", {}),
    "pretraining": ("ForPreTraining", {}),
    "discriminator": ("ForPreTraining", {}),
    "sequence": ("ForSequenceClassification", {"num_labels": 3}),
    "regression": ("ForSequenceClassification", {"num_labels": 1, "problem_type": "regression"}),
    "multilabel": ("ForSequenceClassification", {"num_labels": 4, "problem_type": "multi_label_classification"}),
    "token": ("ForTokenClassification", {"num_labels": 5}),
    "qa": ("ForQuestionAnswering", {}),
    "choice": ("ForMultipleChoice", {}),
}
BERT_WORDS = {
    "vocab_size": golden.VOCAB,
    "hidden_size": golden.HIDDEN,
    "num_hidden_layers": golden.LAYERS,
    "num_attention_heads": golden.HEADS,
    "intermediate_size": 32,
    "max_position_embeddings": 40,
}
ROBERTA = BERT_WORDS | {"type_vocab_size": 1, "layer_norm_eps": 1e-5, "pad_token_id": 1}
WITH_SEGMENTS = BERT_WORDS | {"type_vocab_size": 2, "embedding_size": 8, "pad_token_id": 0}
# A window of three tokens, so that most see a part of their sequence alone; the last layer's is one, too.
MODERNBERT = {key: BERT_WORDS[key] for key in BERT_WORDS if key != "max_position_embeddings"} | {
    "num_hidden_layers": 3,
    "hidden_size": 8,
    "intermediate_size": 12,
    "max_position_embeddings": 40,
    "local_attention": 3,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "cls_token_id": 0,
    "eos_token_id": 2,
    "sep_token_id": 2,
    "classifier_pooling": "mean",
}
# All that configs may turn on or name otherwise.
MODERNBERT_OTHERWISE = {
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 500.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
    },
    "local_attention": 6,
    "attention_bias": True,
    "mlp_bias": True,
    "norm_bias": True,
    "classifier_bias": True,
    "decoder_bias": False,
    "classifier_pooling": "cls",
    "hidden_activation": "silu",
    "classifier_activation": "relu",
    "norm_eps": 1e-3,
}
# As v3's, with buckets so few that the golden sequences use all of them.
DEBERTA_V3 = BERT_WORDS | {
    "type_vocab_size": 0,
    "pad_token_id": 0,
    "relative_attention": True,
    "position_buckets": 4,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
}
# What v2's config can say otherwise: projections of positions of their own, no norm, one kind of scores, absolute positions.
DEBERTA_V2 = DEBERTA_V3 | {
    "type_vocab_size": 2,
    "position_buckets": -1,
    "max_relative_positions": 9,
    "norm_rel_ebd": "none",
    "share_att_key": False,
    "position_biased_input": True,
    "legacy": False,
}
# family: (how its classes begin, its settings)
FAMILIES = {
    "deberta-v2": ("DebertaV2", DEBERTA_V3),
    "deberta-v2-c2p": ("DebertaV2", DEBERTA_V2 | {"pos_att_type": ["c2p"], "share_att_key": True}),
    "deberta-v2-p2c": ("DebertaV2", DEBERTA_V2 | {"pos_att_type": ["p2c"]}),
    "roberta": ("Roberta", ROBERTA),
    "xlm-roberta": ("XLMRoberta", ROBERTA),
    "mpnet": ("MPNet", BERT_WORDS | {"layer_norm_eps": 1e-5, "pad_token_id": 1}),
    "electra": ("Electra", WITH_SEGMENTS),
    "albert": ("Albert", WITH_SEGMENTS | {"hidden_act": "gelu_new"}),
    "modernbert": ("ModernBert", MODERNBERT),
    "modernbert-biases": ("ModernBert", MODERNBERT | MODERNBERT_OTHERWISE),
    "distilbert": (
        "DistilBert",
        {
            "vocab_size": golden.VOCAB,
            "dim": golden.HIDDEN,
            "n_layers": golden.LAYERS,
            "n_heads": golden.HEADS,
            "hidden_dim": 32,
            "max_position_embeddings": 40,
            "pad_token_id": 0,
        },
    ),
}


def make_model(prefix, settings, head):
    ending, more = HEADS[head]
    config = getattr(transformers, f"{prefix}Config")(**settings, **more, attn_implementation="eager")
    model = getattr(transformers, f"{prefix}{ending}")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            draw = torch.randn(parameter.shape, generator=golden.generator(name.removeprefix(f"{model.base_model_prefix}.")))
            is_norm = "norm" in name.lower() and name.endswith("weight")
            parameter.copy_(1 + 0.2 * draw if is_norm else (0.1 if name.endswith("bias") else 0.2) * draw)
    return model


def make_input(settings, head, original=golden.make_input):
    """Ids that are not the padding's: transformers counts positions by them; segments only where there are some."""
    data = original(head)
    pad = settings["pad_token_id"]
    data["ids"] = torch.where(data["ids"] == pad, pad + 1, data["ids"])
    if settings.get("type_vocab_size", 1) < 2:
        data["segments"] = torch.zeros_like(data["segments"])
    return data


def heads_of(family):
    """XLM-R is RoBERTa under other class names: two heads show that they are found; as two show ModernBERT's other settings."""
    if family in ("xlm-roberta", "modernbert-biases"):
        return ["mlm", "sequence"]
    if family == "modernbert":
        return ["model", "mlm", "sequence", "token", "qa", "choice"]
    """XLM-R is RoBERTa under other class names: two heads show that they are found. Variants of a network need one."""
    if family == "xlm-roberta":
        return ["mlm", "sequence"]
    if family.startswith("deberta-v2-"):
        return ["mlm"]
    own = {"pretraining": ["albert"], "discriminator": ["electra"]}
    # DeBERTa's classifier of texts is one for all of its losses.
    left_out = ["regression", "multilabel"] if family == "deberta-v2" else []
    return [head for head in HEADS if family in own.get(head, [family]) and head not in left_out]


def main():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    only = sys.argv[2:]
    default = Path(__file__).resolve().parents[2] / "tests-data" / "relatives-golden"
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else default
    for family, (prefix, settings) in FAMILIES.items():
        if only and family not in only:
            continue
        for head in heads_of(family):
            shutil.rmtree(root / family / head, ignore_errors=True)
            golden.LAYERS = settings.get("num_hidden_layers", 2)
            golden.make_model = lambda head: make_model(prefix, settings, head)
            golden.make_input = lambda head: make_input(settings, head)
            golden.make_head(head, root / family / head)
            rename_tied(root / family / head / "golden.safetensors")


def rename_tied(file):
    """XLM-R's class lists the shared table as the decoder's first; here it is the embeddings', as in model.safetensors."""
    copy, original = "grad.lm_head.decoder.weight", "grad.roberta.embeddings.word_embeddings.weight"
    with safe_open(file, "pt") as opened:
        metadata, names = opened.metadata(), opened.keys()
        if copy not in names:
            return
        tensors = {original if name == copy else name: opened.get_tensor(name) for name in names}
    save_file(tensors, file, metadata=metadata)


if __name__ == "__main__":
    main()
