#!/bin/bash
# Interrupts a search again and again, and compares what it gives with an uninterrupted one.
#
#     tools/check_search.sh HENSON OUT FLAG...
#
# The flags are those of `henson finetune`, without --out; a search of half a minute serves best:
#
#     tools/check_search.sh target/release/henson /tmp/search --task classify --model tiny --train train.tsv --dev dev.tsv \
#         --restarts 2 --grid batch_size=8,16 learning_rate=1e-3,3e-3 epochs=2,3 --set limit=64
#
# Of the 10 interruptions the fourth and the eighth are SIGKILL, the others SIGINT. All of results.json must be the same byte for
# byte, and so must the best model and the printed table.
set -u
henson=$1 out=$2
shift 2
flags=("$@")
mkdir -p "$out"
# To be run in a subshell, which becomes the program: signals reach it itself.
search() {
    exec "$henson" finetune --out "$out/$1" "${flags[@]}" >"$out/$1.txt" 2>>"$out/$1.log"
}
begun=$(date +%s%N)
(search whole) || { tail -3 "$out/whole.log"; exit 1; }
took=$((($(date +%s%N) - begun) / 1000000))
for number in $(seq 10); do
    search parts &
    pid=$!
    # From a twentieth to an eighth of the time that all of it takes.
    sleep "$(awk "BEGIN { print $took / 1000 * (5 + $number * 7 % 8) / 100 }")"
    [ $((number % 4)) = 0 ] && signal=KILL || signal=INT
    kill -$signal $pid 2>/dev/null || echo "interruption $number came too late: the search was finished"
    { wait $pid; } 2>/dev/null
    echo "interruption $number: SIG$signal, exit code $?, $(find "$out/parts/runs" -name results.json | wc -l) runs finished"
done
(search parts) || { tail -3 "$out/parts.log"; exit 1; }
failed=0
for file in results.json model.safetensors config.json; do
    if cmp "$out/whole/$file" "$out/parts/$file"; then echo "$file: the same"; else failed=1; fi
done
if cmp "$out/whole.txt" "$out/parts.txt"; then echo "the table: the same"; else failed=1; fi
exit $failed
