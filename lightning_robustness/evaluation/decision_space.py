import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor
from typing_extensions import override

from lightning_robustness._arguments import check_option
from lightning_robustness._display import report_figures as figures
from lightning_robustness._measurement.meters import Meter
from lightning_robustness._measurement.rows import Rows
from lightning_robustness._measurement.subject import Subject
from lightning_robustness._model.batch import Batch
from lightning_robustness._model.head import HeadTap
from lightning_robustness._model.route import Route
from lightning_robustness._numbers import accumulation_dtype
from lightning_robustness.attacks import budget_of, run_attack

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Projection = Literal["pca", "tsne"]


@dataclass
class DecisionSpace:
    """Inputs of the classifier head, or logits without one, of clean and adversarial samples, in two dimensions."""

    method: str
    attack: str
    labels: list[int]
    clean: list[list[float]]
    adversarial: list[list[float]]

    def plot(self) -> "Figure":
        """Draw clean and adversarial samples side by side, coloured by true class."""
        panels = {"clean samples": self.clean, f"under {self.attack}": self.adversarial}
        return figures.clouds(panels, self.labels, self.method)


@dataclass(frozen=True)
class DecisionSpaceMeter(Meter):
    """Embeddings before and after an attack; logits where the model has no head."""

    size: int
    key: str
    attack: Callable[..., Any]
    method: Projection = "pca"

    name = "decision space"
    title = "decision space"
    label = "the decision space"
    keeps_partial = False

    @override
    def measure(self, subject: Subject, batch: Batch) -> Mapping[str, Tensor]:
        forward, route = subject.logits_of(batch), cast(Route, subject.route)
        x, y = batch.x, batch.labels()
        x_adv = run_attack(
            forward, self.attack, x, y, input_space=subject.input_space, seed=subject.seed, positions=batch.positions
        ).x_adv
        tap = route.tap(subject.model)
        return {"labels": y, "clean": _embedding(tap, forward, x), "adversarial": _embedding(tap, forward, x_adv)}


def project(meter: DecisionSpaceMeter, rows: Rows, subject: Subject) -> DecisionSpace:
    """Project embeddings to the plane, before and after an attack together: by PCA, or by scikit-learn's t-SNE."""
    reduce = get_projection(meter.method, subject.seed)
    points, number = reduce(torch.cat([rows["clean"], rows["adversarial"]])), len(rows)
    budget = budget_of(meter.attack, subject.input_space)
    title = meter.key if budget is None else f"{meter.key}, $\\epsilon$ = {budget.eps:.3g}"
    label = {"pca": "PCA", "tsne": "t-SNE"}[meter.method]
    return DecisionSpace(label, title, rows["labels"].tolist(), points[:number].tolist(), points[number:].tolist())


def _embedding(tap: HeadTap, forward: Callable[..., Any], x: Tensor) -> Tensor:
    embedding, logits = tap.run(forward, x)
    return logits if embedding is None else embedding


def get_projection(method: Projection, seed: int) -> Callable[[Tensor], Tensor]:
    """Return a function that projects features to the plane."""
    check_option("decision_space", method, Projection)
    if method == "pca":
        return _pca
    try:
        manifold = importlib.import_module("sklearn.manifold")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "Expected scikit-learn to be installed for t-SNE but it was not found. Install it with "
            '`pip install scikit-learn`, or use "pca".'
        ) from error

    def tsne(features: Tensor) -> Tensor:
        perplexity = min(30.0, (len(features) - 1) / 3)
        start = "pca" if features.shape[1] > 1 else "random"
        transform = manifold.TSNE(perplexity=perplexity, init=start, random_state=seed).fit_transform
        return torch.as_tensor(transform(features.float().cpu().numpy()))

    return tsne


def _pca(features: Tensor) -> Tensor:
    centered = features.to(accumulation_dtype(features.device))
    centered = centered - centered.mean(dim=0)
    _, _, directions = torch.linalg.svd(centered, full_matrices=False)
    plane = directions[:2]
    # The sign of a direction is arbitrary: make its largest entry positive
    largest = plane.gather(1, plane.abs().argmax(dim=1, keepdim=True))
    points = centered @ (plane * largest.sign()).T
    return torch.nn.functional.pad(points, (0, 2 - points.shape[1]))
