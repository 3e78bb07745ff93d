"""A directory of sentence-transformers with random weights, for figures of speed where no weights can be brought.

    python tools/bench/random_sentence_model.py OUT --size minilm|base --vocabulary vocab.txt

BERT's network in the size of all-MiniLM-L6-v2 (6 layers of 384) or of all-mpnet-base-v2 (12 of 768), a mean over tokens, vectors of length 1;
the tokenizer is bert-base-uncased's, whose vocab.txt is given.
"""

import argparse
import json
import os
import pathlib
import shutil

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

parser = argparse.ArgumentParser()
parser.add_argument("out", type=pathlib.Path)
parser.add_argument("--size", choices=["minilm", "base"], default="minilm")
parser.add_argument("--vocabulary", type=pathlib.Path, required=True)
flags = parser.parse_args()
torch.manual_seed(0)
sizes = dict(num_hidden_layers=6, hidden_size=384, intermediate_size=1536) if flags.size == "minilm" else {}
config = transformers.BertConfig(vocab_size=len(flags.vocabulary.read_text(encoding="utf-8").splitlines()), **sizes)
transformers.BertModel(config).save_pretrained(flags.out)
shutil.copyfile(flags.vocabulary, flags.out / "vocab.txt")
from tokenizers import BertWordPieceTokenizer

tokenizer = BertWordPieceTokenizer(str(flags.vocabulary), lowercase=True)
special = dict(unk_token="[UNK]", sep_token="[SEP]", cls_token="[CLS]", pad_token="[PAD]", mask_token="[MASK]")
transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, model_max_length=512, **special).save_pretrained(flags.out)
parts = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
modules = [{"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"} for i, (path, name) in enumerate(parts)]
(flags.out / "modules.json").write_text(json.dumps(modules))
(flags.out / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 128, "do_lower_case": False}))
(flags.out / "2_Normalize").mkdir(exist_ok=True)
(flags.out / "1_Pooling").mkdir(exist_ok=True)
pooling = {"word_embedding_dimension": config.hidden_size, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": False}
(flags.out / "1_Pooling/config.json").write_text(json.dumps(pooling))
