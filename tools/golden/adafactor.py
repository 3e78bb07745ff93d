"""Print what transformers' Adafactor makes of a matrix and a vector: the values in crates/kernels/tests/kernels/adafactor.rs.

    pip install torch transformers && python tools/golden/adafactor.py
"""

import torch
from transformers.optimization import Adafactor

ROWS, COLUMNS, VECTOR = 3, 4, 5
MATRIX = ROWS * COLUMNS

for scale_parameter, decay in ((True, 0.0), (False, 0.2)):
    i = torch.arange(MATRIX + VECTOR, dtype=torch.float64)
    start = torch.sin(i * 0.9 + 0.4)
    matrix = torch.nn.Parameter(start[:MATRIX].reshape(ROWS, COLUMNS).clone())
    vector = torch.nn.Parameter(start[MATRIX:].clone() * 1e-4)
    optimizer = Adafactor(
        [matrix, vector], lr=0.1, scale_parameter=scale_parameter, relative_step=False, weight_decay=decay
    )
    for step in range(1, 6):
        # The vector's gradients grow faster than its moment follows, so that its update is clipped.
        gradient = torch.cos(i * 1.3 + step * 0.7) * (0.1 + 0.01 * i)
        matrix.grad = gradient[:MATRIX].reshape(ROWS, COLUMNS)
        vector.grad = gradient[MATRIX:] * 4.0**step
        optimizer.step()
    numbers = torch.cat([matrix.detach().flatten(), vector.detach()])
    state = [optimizer.state[matrix][key] for key in ("exp_avg_sq_row", "exp_avg_sq_col")]
    print([float(x) for x in numbers])
    print([float(x) for x in torch.cat([*state, optimizer.state[vector]["exp_avg_sq"]])])
