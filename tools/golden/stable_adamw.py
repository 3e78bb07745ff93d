"""Print what optimi's StableAdamW makes of two small tensors: the values in crates/kernels/tests/kernels/optimizer.rs.

    pip install torch-optimi==0.3.3 && python tools/golden/stable_adamw.py
"""

import torch
from optimi import StableAdamW

DECAYED, ALL = 4, 7

start = torch.sin(torch.arange(ALL, dtype=torch.float64) * 0.9 + 0.4)
first, second = (torch.nn.Parameter(part.clone()) for part in (start[:DECAYED], start[DECAYED:]))
groups = [{"params": [first], "weight_decay": 0.3}, {"params": [second], "weight_decay": 0.0}]
optimizer = StableAdamW(groups, lr=0.1, betas=(0.9, 0.98), eps=1e-6, foreach=False, triton=False)
i = torch.arange(ALL, dtype=torch.float64)
for step in range(1, 6):
    first.grad = torch.cos(i[:DECAYED] * 1.3 + step * 0.7) * 0.1
    second.grad = torch.sin(i[DECAYED:] * 2.1) * 4.0**step
    optimizer.step()
print([float(x) for x in torch.cat([first.detach(), second.detach()])])
