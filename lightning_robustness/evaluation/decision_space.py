import importlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from typing_extensions import Self

from lightning_robustness.attacks import budget_of, run
from lightning_robustness.evaluation import figures
from lightning_robustness.measurement.subject import Samples, Subject
from lightning_robustness.utilities.checks import check_option
from lightning_robustness.utilities.head import HeadTap
from lightning_robustness.utilities.precision import accumulation_dtype

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Projection = Literal["pca", "tsne"]


@dataclass
class DecisionSpace:
    """Inputs of the classifier head for clean and adversarial samples, projected to two dimensions.

    Args:
        method: How the dimensions were reduced: ``"PCA"`` or ``"t-SNE"``.
        attack: Name of the attack, with its budget.
        labels: True labels.
        clean: One point per sample.
        adversarial: One point per sample, after the attack.

    """

    method: str
    attack: str
    labels: list[int]
    clean: list[list[float]]
    adversarial: list[list[float]]

    def plot(self) -> "Figure":
        """Draw clean and adversarial samples side by side, coloured by true class.

        Raises:
            ModuleNotFoundError: If matplotlib is not installed; the extra ``plot`` brings it.

        """
        return figures.decision_space_figure(self)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as dictionaries, lists, strings and numbers."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """Make it from the result of ``to_dict``."""
        return cls(**fields)


def embed_batch(subject: Subject, tap: HeadTap, attack: Callable[..., Any], batch: Samples) -> dict[str, Tensor]:
    """Attack a batch and return its labels and the inputs of the classifier head, before and after."""
    x, y, positions = batch.x, batch.labels(), batch.positions
    x_adv = run(subject.forward, attack, x, y, subject.input_space, subject.seed, positions=positions).x_adv
    clean, adversarial = (_embedding(tap, subject.forward, inputs) for inputs in (x, x_adv))
    return {"labels": y, "clean": clean, "adversarial": adversarial}


def project(
    rows: Mapping[str, Tensor], subject: Subject, attack: Callable[..., Any], name: str, method: Projection = "pca"
) -> DecisionSpace:
    """Project the inputs of the classifier head, before and after an attack, to the plane.

    Both are projected together: by PCA, or by scikit-learn's t-SNE, which the ROBY paper uses.

    Args:
        rows: What ``embed_batch`` returned, of all samples.
        subject: The model.
        attack: The attack.
        name: Its name.
        method: How to project.

    Raises:
        ModuleNotFoundError: If scikit-learn is not installed, for t-SNE.
        ValueError: If the method is unknown.

    """
    reduce = get_projection(method, subject.seed)
    points, number = reduce(torch.cat([rows["clean"], rows["adversarial"]])), len(rows["labels"])
    budget = budget_of(attack, subject.input_space)
    title = name if budget is None else f"{name}, $\\epsilon$ = {budget.eps:.3g}"
    label = {"pca": "PCA", "tsne": "t-SNE"}[method]
    return DecisionSpace(label, title, rows["labels"].tolist(), points[:number].tolist(), points[number:].tolist())


def _embedding(tap: HeadTap, forward: Callable[..., Any], x: Tensor) -> Tensor:
    embedding, logits = tap.run(forward, x)
    return logits if embedding is None else embedding


def get_projection(method: Projection, seed: int) -> Callable[[Tensor], Tensor]:
    """Return a function that projects features to the plane.

    Raises:
        ModuleNotFoundError: If scikit-learn is not installed, for t-SNE.
        ValueError: If the method is unknown.

    """
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
        transform = manifold.TSNE(perplexity=perplexity, init="pca", random_state=seed).fit_transform
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
