"""Make tests-data/sentence-losses/golden.json: losses of sentence-transformers on fixed vectors, with their gradients.

    HF_HUB_OFFLINE=1 python tools/golden/sentence_losses.py [OUTPUT_FILE]

Each case has the vectors of its texts (column by column: all first texts, all second ones, then each column of negatives), what
they are held against, the loss and its gradient by every number. Vectors are f32 numbers, computed with in f64. A case with
`dims` is MatryoshkaLoss around its loss, with `normalise` a model that ends with a Normalize module.
"""

import importlib
import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.losses.contrastive import SiameseDistanceMetric
from sentence_transformers.sentence_transformer.losses.matryoshka import shrink
from sentence_transformers.sentence_transformer.losses.triplet import TripletDistanceMetric

OUT = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[2] / "tests-data/sentence-losses/golden.json"
WIDTH = 5
HEAD = 3


class Student(torch.nn.Module):
    """What losses ask of a model."""

    def get_embedding_dimension(self):
        return WIDTH

    device = torch.device("cpu")


def vectors(columns, count, seed):
    numbers = torch.arange(columns * count * WIDTH, dtype=torch.float64)
    made = torch.sin(1.7 * numbers + 0.6 * seed) + 0.4 * torch.cos(0.31 * numbers * (seed + 1))
    return made.float().double().reshape(columns, count, WIDTH)


def numbers(count, seed, scale=1.0):
    made = scale * torch.sin(2.3 * torch.arange(count, dtype=torch.float64) + seed)
    return made.float().double()


def case(name, loss, columns, count, labels=None, dims=None, normalise=False, seed=0, **settings):
    x = vectors(columns, count, seed).requires_grad_()

    def value(rows, labels):
        embeddings = list(rows)
        if hasattr(loss, "compute_loss_from_embeddings") and not isinstance(loss, losses.MSELoss):
            return loss.compute_loss_from_embeddings(embeddings, labels)
        if isinstance(loss, losses.MSELoss):
            return loss.compute_loss_from_embeddings(embeddings, [labels] * columns)
        module = importlib.import_module(type(loss).__module__)
        module.embed_columns = lambda model, features: features
        return loss(embeddings, labels)

    rows = F.normalize(x, p=2, dim=-1) if normalise else x
    if dims:
        cut = lambda dim: labels[..., :dim] if isinstance(loss, losses.MSELoss) else labels
        total = sum(weight * value(shrink(rows, dim), cut(dim)) for dim, weight in dims)
    else:
        total = value(rows, labels)
    total.backward()
    made = {"name": name, "queries": count, "columns": columns, "width": WIDTH, **settings}
    if dims:
        made["dims"] = dims
    if normalise:
        made["normalise"] = True
    if labels is not None:
        made["labels"] = labels.flatten().tolist()
    if name == "softmax":
        classifier = loss.classifier
        made["head"] = torch.cat([classifier.weight, classifier.bias[:, None]], 1).flatten().tolist()
        made["head_gradient"] = torch.cat([classifier.weight.grad, classifier.bias.grad[:, None]], 1).flatten().tolist()
    made["vectors"] = [round(v, 9) for v in x.detach().flatten().tolist()]
    made["loss"] = total.item()
    made["gradient"] = [round(v, 12) for v in x.grad.flatten().tolist()]
    return made


def softmax():
    loss = losses.SoftmaxLoss(Student(), sentence_embedding_dimension=WIDTH, num_labels=HEAD).double()
    with torch.no_grad():
        for number, parameter in enumerate(loss.parameters()):
            parameter.copy_((0.5 * torch.sin(torch.arange(parameter.numel()) + number)).float().double().reshape(parameter.shape))
    return loss


def cases():
    student = Student()
    for count in [1, 2, 5, 7]:
        ranking = losses.MultipleNegativesRankingLoss(student)
        yield case("ranking", ranking, 2, count, temperature=0.05)
        yield case("ranking", ranking, 4, count, seed=1, temperature=0.05)
        symmetric = losses.MultipleNegativesSymmetricRankingLoss(student, scale=7.0)
        yield case("ranking", symmetric, 3, count, seed=2, temperature=1 / 7, symmetric=True)
        yield case("cosine", losses.CosineSimilarityLoss(student), 2, count, numbers(count, 1), seed=3)
        yield case("cosent", losses.CoSENTLoss(student), 2, count, numbers(count, 2).round(decimals=1), seed=4, temperature=0.05)
        labels = (torch.arange(count) % 2).double()
        for distance, metric in [("cosine", SiameseDistanceMetric.COSINE_DISTANCE), ("euclidean", SiameseDistanceMetric.EUCLIDEAN),
                                 ("manhattan", SiameseDistanceMetric.MANHATTAN)]:
            margin = 0.5 if distance == "cosine" else 3.5
            loss = losses.ContrastiveLoss(student, distance_metric=metric, margin=margin)
            yield case("contrastive", loss, 2, count, labels, seed=5, distance=distance, margin=margin)
        for distance, metric in [("cosine", TripletDistanceMetric.COSINE), ("euclidean", TripletDistanceMetric.EUCLIDEAN),
                                 ("manhattan", TripletDistanceMetric.MANHATTAN)]:
            margin = 0.3 if distance == "cosine" else 1.0
            loss = losses.TripletLoss(student, distance_metric=metric, triplet_margin=margin)
            yield case("triplet", loss, 3, count, seed=6, distance=distance, margin=margin)
        yield case("triplet", losses.TripletLoss(student), 3, count, seed=6, distance="euclidean", margin=5.0, normalise=True)
        yield case("margin-mse", losses.MarginMSELoss(student), 3, count, numbers(count, 3, 4.0), seed=7)
        several = numbers(2 * count, 3, 4.0).reshape(count, 2)
        yield case("margin-mse", losses.MarginMSELoss(student), 4, count, several, seed=8)
        teacher = vectors(1, count, 20)[0]
        yield case("mse", losses.MSELoss(student), 1, count, teacher, seed=9)
        yield case("mse", losses.MSELoss(student), 2, count, teacher, seed=10)
        yield case("softmax", softmax(), 2, count, torch.arange(count) % HEAD, seed=11)
        dims = [[5, 1.0], [3, 1.0], [2, 1.0]]
        yield case("ranking", ranking, 3, count, seed=12, temperature=0.05, dims=dims)
        yield case("cosent", losses.CoSENTLoss(student), 2, count, numbers(count, 4), seed=13, temperature=0.05, dims=dims)
        yield case("mse", losses.MSELoss(student), 1, count, teacher, seed=14, dims=dims)
        yield case("cosine", losses.CosineSimilarityLoss(student), 2, count, numbers(count, 5), seed=16, dims=dims)
        yield case("triplet", losses.TripletLoss(student), 3, count, seed=17, distance="euclidean", margin=5.0, dims=dims)
        yield case("ranking", ranking, 2, count, seed=15, temperature=0.05, normalise=True)


def main():
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text("[\n" + ",\n".join(json.dumps(case) for case in cases()) + "\n]\n")


main()
