#!/usr/bin/env bash
# SciBERT's question on small models: is it better to pre-train from scratch with a vocabulary of the domain, or to continue from a
# general model, with or without words of the domain? All four are fine-tuned on scientific entities, and a table is printed.
#
#   HENSON=target/release/henson recipes/scibert/run.sh SCITLDR.jsonl.gz TRAIN.conll DEV.conll OUT [key=value…]
#
# GENERAL names the general model (models/henson-12m), SCALE=tiny tries all commands in a few minutes, DEVICE=cuda uses a GPU, SEEDS
# are those of fine-tuning. What is in OUT is not computed again. Further arguments are settings of every pre-training.
set -euo pipefail
abstracts=$1 train=$2 dev=$3 out=$4
shift 4
here=$(cd "$(dirname "$0")" && pwd)
henson=${HENSON:-henson} general=${GENERAL:-$here/../../models/henson-12m} device=(--device "${DEVICE:-cpu}") seeds=${SEEDS:-"0 1 2"}
words=16384 new=2000 pretrain=() finetune=()
for setting in "$@"; do pretrain+=(--set "$setting"); done
if [[ ${SCALE:-} == tiny ]]; then
  words=2000 new=200 seeds=0
  pretrain+=(--set steps=4 --set warmup_steps=1 --set batch_size=4 --set eval_sequences=8)
  finetune+=(--set limit=64 --set epochs=1)
fi
mkdir -p "$out"
if [[ ${SCALE:-} == tiny ]]; then
  head -n 1000 "$dev" > "$out/dev.conll"
  dev=$out/dev.conll
fi

if [[ ! -f $out/science.txt ]]; then
  python3 "$here/text.py" "$abstracts" "$train" > "$out/science.part"
  mv "$out/science.part" "$out/science.txt"
fi
shards() { # TOKENIZER NAME
  [[ -d $out/shards-$2 ]] || "$henson" data build --tokenizer "$1" --held-out 0.02 --out "$out/shards-$2" "$out/science.txt"
}

# A vocabulary of the domain; and the general one with the domain's most frequent words that it lacks (a trained vocabulary begins
# with letters and goes on with what was merged first).
[[ -d $out/tokenizer-own ]] || "$henson" tokenizer train --kind wordpiece --vocab-size $words --out "$out/tokenizer-own" "$out/science.txt"
if [[ ! -d $out/tokenizer-extended ]]; then
  awk 'NR == FNR { known[$0]; next } !($0 in known) && length($0) > 3 && /^[a-z]+$/' \
    "$general/vocab.txt" "$out/tokenizer-own/vocab.txt" > "$out/words.all"
  head -n $new "$out/words.all" > "$out/words.txt"
  "$henson" tokenizer extend --model "$general" --pieces "$out/words.txt" --out "$out/tokenizer-extended"
fi
shards "$out/tokenizer-own" own
shards "$general" general
shards "$out/tokenizer-extended" extended

"$henson" pretrain "$here/scratch.toml" --data "$out/shards-own" "${device[@]}" "${pretrain[@]}" --out "$out/scratch"
"$henson" pretrain "$here/continue.toml" --model "$general" --data "$out/shards-general" "${device[@]}" "${pretrain[@]}" --out "$out/continued"
"$henson" pretrain "$here/continue.toml" --model "$general" --data "$out/shards-extended" "${device[@]}" "${pretrain[@]}" --out "$out/continued-new-words"

declare -A models=([general]=$general [scratch]=$out/scratch [continued]=$out/continued [continued-new-words]=$out/continued-new-words)
for name in general scratch continued continued-new-words; do
  for seed in $seeds; do
    "$henson" finetune --task tag --model "${models[$name]}" --train "$train" --dev "$dev" --seed "$seed" "${device[@]}" \
      "${finetune[@]}" --out "$out/entities-$name-$seed" > /dev/null
  done
done
python3 - "$out" $seeds <<'PYTHON'
import json, statistics, sys
out, seeds = sys.argv[1], sys.argv[2:]
print("| model | F1 of entities |\n|---|---|")
for name in ["general", "scratch", "continued", "continued-new-words"]:
    scores = [100 * json.load(open(f"{out}/entities-{name}-{seed}/results.json"))["value"] for seed in seeds]
    print(f"| {name} | {statistics.mean(scores):.1f} ({', '.join(f'{score:.1f}' for score in scores)}) |")
PYTHON
