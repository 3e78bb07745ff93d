"""Lengths of sequences as in the second phase of MLPerf's BERT: `henson bench train --model bert-large --lengths FILE` reads them.

    python tools/bench/mlperf_lengths.py --count 2048 [--seed 0] > lengths.txt
    henson bench train --device cuda --dtype bf16 --model bert-large --lengths lengths.txt --batch 256 --optimizer lamb --json

Sequences of up to 512 tokens from Wikipedia, 16.3 million in all, of which 3.8 million are full. Their numbers are those of Krell et al.
(2021, "Packing: Towards 2x NLP BERT Acceleration"; graphcore/tutorials, blogs_code/packedBERT/histograms.py), added up here for every 16
lengths; within 16 they are drawn evenly. The mean is 255.8 tokens as it is there. Draws are spread evenly over the distribution, so that a
small file has its mean as well, and shuffled.
"""

import argparse
import random

# Thousands of sequences with 1 to 16 tokens, with 17 to 32, …; the full ones apart.
THOUSANDS = [52, 533, 1100, 1179, 1020, 833, 696, 602, 535, 479, 438, 403, 374, 346, 325, 305,
             286, 268, 254, 242, 230, 220, 210, 200, 191, 184, 177, 170, 163, 158, 153, 139]
FULL = 3815

parser = argparse.ArgumentParser()
parser.add_argument("--count", type=int, default=2048)
parser.add_argument("--seed", type=int, default=0)
flags = parser.parse_args()
draw = random.Random(flags.seed)
lengths = []
for i in range(flags.count):
    place = (i + draw.random()) / flags.count * (sum(THOUSANDS) + FULL)
    length = 512
    for number, thousands in enumerate(THOUSANDS):
        if place < thousands:
            # Lengths below 5 do not occur: two segments with their special tokens.
            length = max(5, 16 * number + 1 + int(16 * place / thousands))
            break
        place -= thousands
    lengths.append(min(length, 512))
draw.shuffle(lengths)
print("\n".join(map(str, lengths)))
