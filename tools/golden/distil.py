"""The losses of distillation by their formulas in PyTorch, in f64: values and gradients.

    python tools/golden/distil.py > tests-data/distil/golden.json

Classes: alpha * T^2 * KL(softmax(t/T) || softmax(z/T)), mean over rows, plus (1 - alpha) * weighted cross-entropy of the labels.
Several labels: the same with a Bernoulli distribution for each, means over rows and labels; weights are `pos_weight`.
Numbers: squared errors. Margins: MSE of all differences within a list. Vectors: MSE, and 1 - cosine, through a matrix where there is one.
Logits are rounded to two digits, so that they are the same in f32.
"""

import itertools
import json

import torch
import torch.nn.functional as F

torch.manual_seed(5)
torch.set_default_dtype(torch.float64)


def draw(*shape, scale=2.0):
    # Representable in f32, and short in JSON.
    return (torch.randn(*shape) * scale * 64).round() / 64


def case(name, rows, teacher, loss_of, temperature=1.0, alpha=1.0, labels=(), numbers=(), weights=(), projection=None):
    leaves = [row.clone().requires_grad_() for row in rows]
    matrix = None if projection is None else projection.clone().requires_grad_()
    loss = loss_of(leaves, matrix)
    loss.backward()
    return {
        "name": name,
        "temperature": temperature,
        "alpha": alpha,
        "rows": [row.tolist() for row in rows],
        "teacher": [row.tolist() for row in teacher],
        "labels": list(labels),
        "numbers": [row.tolist() for row in numbers],
        "weights": list(weights),
        "projection": [] if projection is None else projection.flatten().tolist(),
        "loss": loss.item(),
        "gradient": [(torch.zeros_like(row) if row.grad is None else row.grad).tolist() for row in leaves],
        "projection_gradient": [] if matrix is None else matrix.grad.flatten().tolist(),
    }


def classes(n, k, temperature, alpha, missing):
    rows, teacher = list(draw(n, k)), list(draw(n, k))
    labels = [None if i in missing else int(torch.randint(k, ())) for i in range(n)]
    weights = [1.0 + 0.5 * i for i in range(k)]

    def loss_of(leaves, _):
        z, t = torch.stack(leaves), torch.stack(teacher)
        soft = F.kl_div(F.log_softmax(z / temperature, -1), F.softmax(t / temperature, -1), reduction="batchmean")
        known = [i for i, label in enumerate(labels) if label is not None]
        hard = torch.zeros(())
        if known:
            y = torch.tensor([labels[i] for i in known])
            hard = F.cross_entropy(z[known], y, weight=torch.tensor(weights))
        return alpha * temperature**2 * soft + (1 - alpha) * hard

    return case("classes", rows, teacher, loss_of, temperature, alpha, labels=labels, weights=weights)


def several(n, k, temperature, alpha):
    rows, teacher, numbers = list(draw(n, k)), list(draw(n, k)), list(torch.randint(2, (n, k)).double())
    weights = [1.0 + 0.25 * i for i in range(k)]

    def loss_of(leaves, _):
        z, t, y = torch.stack(leaves), torch.stack(teacher), torch.stack(numbers)
        q = torch.sigmoid(t / temperature)
        entropy = -(q * q.log() + (1 - q) * (1 - q).log())
        soft = (F.binary_cross_entropy_with_logits(z / temperature, q, reduction="none") - entropy).mean()
        hard = F.binary_cross_entropy_with_logits(z, y, pos_weight=torch.tensor(weights))
        return alpha * temperature**2 * soft + (1 - alpha) * hard

    return case("several", rows, teacher, loss_of, temperature, alpha, numbers=numbers, weights=weights)


def numbers(n, alpha):
    rows, teacher, right = list(draw(n, 1)), list(draw(n, 1)), list(draw(n, 1))

    def loss_of(leaves, _):
        z = torch.stack(leaves)
        return alpha * F.mse_loss(z, torch.stack(teacher)) + (1 - alpha) * F.mse_loss(z, torch.stack(right))

    return case("numbers", rows, teacher, loss_of, alpha=alpha, numbers=right)


def margins(lengths):
    rows, teacher = [draw(n) for n in lengths], [draw(n) for n in lengths]

    def loss_of(leaves, _):
        off = [
            (z[i] - z[j]) - (t[i] - t[j])
            for z, t in zip(leaves, teacher)
            for i, j in itertools.combinations(range(len(z)), 2)
        ]
        return torch.stack(off).square().mean()

    return case("margins", rows, teacher, loss_of)


def vectors(name, n, width, teacher_width=None):
    rows, teacher = list(draw(n, width)), list(draw(n, teacher_width or width))
    projection = draw(teacher_width, width, scale=0.5) if teacher_width else None

    def loss_of(leaves, matrix):
        v, t = torch.stack(leaves), torch.stack(teacher)
        v = v if matrix is None else v @ matrix.T
        return F.mse_loss(v, t) if name == "mse" else (1 - F.cosine_similarity(v, t)).mean()

    return case(name, rows, teacher, loss_of, projection=projection)


cases = [classes(n, k, t, a, m) for n, k, t, a, m in [
    (1, 2, 1.0, 1.0, {0}), (5, 3, 2.0, 0.5, {1}), (7, 13, 4.0, 0.9, set()), (3, 2, 0.5, 0.1, {0, 2}), (2, 33, 10.0, 1.0, {0, 1})]]
cases += [several(n, k, t, a) for n, k, t, a in [(1, 1, 1.0, 1.0), (5, 3, 2.0, 0.5), (3, 7, 4.0, 0.9)]]
cases += [numbers(n, a) for n, a in [(1, 1.0), (5, 0.5), (7, 0.1)]]
cases += [margins(lengths) for lengths in [(2,), (3, 2, 5), (7, 1, 3)]]
cases += [vectors(name, *sizes) for name in ("mse", "cosine") for sizes in [(1, 3), (5, 7), (3, 5, 9), (7, 9, 5)]]
print(json.dumps(cases, separators=(",", ":")))
