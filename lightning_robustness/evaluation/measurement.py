"""What the monitor and ``evaluate`` measure: the same parts, so that they agree key by key.

Each part takes what it needs in ``update``, in every process its share, and gives the values of all processes by name
in ``compute``. Only ``compute`` talks to the other processes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import MeanMetric
from torchmetrics.utilities.distributed import gather_all_tensors
from tqdm import tqdm  # type: ignore[import-untyped]

from lightning_robustness.attacks import Attack, AttackResult, MaskingSign, budget_of, get_attack, masking_signs, run
from lightning_robustness.functional.fisher_spectral_norm import FisherMethod
from lightning_robustness.metrics import ROBY, AttackSuccessRate, FisherSpectralNorm, RobustnessDifferenceIndex
from lightning_robustness.metrics.class_statistics import Mode
from lightning_robustness.utilities.head import HeadCall
from lightning_robustness.utilities.input_space import InputSpace
from lightning_robustness.utilities.precision import accumulation_dtype

AttackLike = str | Attack | Callable[..., Any]
# Of attacks by name, where the defaults are too expensive to be repeated during training
_OPTIONS = {"square": {"num_queries": 200}}
# Of what an attack did to a sample
_COLUMNS = (
    *("y", "preds", "adv_preds", "eligible", "success", "l2", "linf"),
    *("queries", "zero_gradients", "probabilities", "deterministic"),
)


def name_attacks(
    attacks: Iterable[AttackLike] | Mapping[str, AttackLike], eps: float | None = None
) -> dict[str, Callable[..., Any]]:
    """Get attacks with the names that their values are reported by.

    Args:
        attacks: Names that ``get_attack`` knows, attacks or other callables; a mapping says what to call them. Square,
            by name, takes 200 queries, the number of the RDI paper for CIFAR, since its usual 5,000 would cost more
            than the training that is watched.
        eps: Budget of those that are given by name.

    Raises:
        ValueError: If an attack is unknown or targeted, or two have the same name.

    Example:
        >>> from lightning_robustness.attacks import PGD
        >>> from lightning_robustness.evaluation.measurement import name_attacks
        >>> list(name_attacks(["square", "torchattacks:DeepFool", PGD(steps=100)], eps=0.1))
        ['square', 'deepfool', 'pgd']

    """
    if isinstance(attacks, str) or callable(attacks):
        raise ValueError(f"Expected argument `attacks` to be a list but got {attacks!r}. Pass [{attacks!r}].")
    pairs = attacks.items() if isinstance(attacks, Mapping) else [(_default_name(attack), attack) for attack in attacks]
    named: dict[str, Callable[..., Any]] = {}
    for name, attack in pairs:
        if name in named:
            raise ValueError(
                f"Expected attacks of different names but got {name!r} twice. Pass a mapping, such as "
                f"{{'{name}_weak': ..., '{name}_strong': ...}}."
            )
        options: dict[str, Any] = {"eps": eps, **_OPTIONS.get(attack, {})} if isinstance(attack, str) else {}
        named[name] = get_attack(attack, **options)
        if getattr(named[name], "targeted", False):
            raise ValueError(
                f"Expected attacks without a target but got {named[name]!r}. A data set has true labels only."
            )
    return named


class FeatureMeter:
    """RDI, ROBY and clean accuracy, from what passes through the head.

    Args:
        num_classes: Number of classes.
        mode: ``"exact"`` or ``"streaming"``.
        device: Where the states live.

    """

    def __init__(self, num_classes: int, mode: Mode, device: torch.device) -> None:
        self._rdi = RobustnessDifferenceIndex(num_classes, mode=mode).to(device)
        self._rdi_embedding = RobustnessDifferenceIndex(num_classes, mode=mode).to(device)
        self._roby = ROBY(num_classes, mode=mode).to(device)
        self._accuracy = MeanMetric().to(device)
        self.seconds = 0.0
        self.distances: dict[str, Tensor] = {}

    def update(self, call: HeadCall, y: Tensor | None) -> None:
        """Add a batch: embedding, logits and, if there are any, true labels."""
        with _stopwatch(self):
            preds = call.logits.argmax(dim=1)
            self._rdi.update(call.logits, preds)
            self._rdi_embedding.update(call.embedding, preds)
            self._roby.update(call.embedding, preds)
            self._accuracy.update(call.logits.new_zeros(0) if y is None else (preds == y).float())

    def compute(self) -> dict[str, float]:
        """Compute the values over all batches of all processes, and keep the distances of each class."""
        with _stopwatch(self):
            rdi, embedding = self._rdi.compute_components(), self._rdi_embedding.compute_components()
            roby = self._roby.compute_components()
            self.distances = {"rdi": rdi["distances"], "roby": roby["distances"]}
            values = {
                "rdi": rdi["rdi"],
                "rdi_intra": rdi["intra"],
                "rdi_inter": rdi["inter"],
                "rdi_embedding": embedding["rdi"],
                **{name: roby[name] for name in ("roby", "fsa", "fsd")},
                "samples": rdi["counts"].sum(),
            }
            accuracy = self._accuracy.compute()  # in any case, since other processes may have labels and wait for this
            if not accuracy.isnan():
                values["acc"] = accuracy
            return {name: value.item() for name, value in values.items()}


class FisherMeter:
    """The spectral norm of the Fisher information.

    Args:
        method: How to compute it.
        input_space: What the inputs mean.
        seed: Seed of random vectors, for methods that draw some.
        batch_size: Number of samples to work on at a time.

    """

    def __init__(self, method: FisherMethod, input_space: InputSpace, seed: int, batch_size: int) -> None:
        self._metric = FisherSpectralNorm(method=method, input_space=input_space, seed=seed)
        self._batch_size = batch_size
        self._values: list[Tensor] = []
        self.seconds = 0.0
        self.values = torch.zeros(0)

    def update(self, forward: Callable[..., Any], x: Tensor, device: torch.device, progress: bool = False) -> None:
        """Add samples, moved to the device batch by batch."""
        self._metric.to(device)
        with _stopwatch(self):
            for rows in tqdm(x.split(self._batch_size), desc="Fisher information", leave=False, disable=not progress):
                self._metric.update(forward, rows.to(device))
                self._values.append(self._metric.last_values)

    def compute(self) -> dict[str, float]:
        """Compute the means over all samples of all processes, and keep the value of each sample."""
        with _stopwatch(self):
            device = self._metric.device
            # Without samples, the type that other processes have theirs in is not known
            none = torch.zeros(0, dtype=accumulation_dtype(device), device=device)
            self.values = _gather(torch.cat([none, *self._values]))
            parts = self._metric.compute_components()
            names = {"fim": "mean", "fim_inverse": "inverse", "fim_geometric": "geometric", "lipschitz": "lipschitz"}
            values = {name: parts[part].item() for name, part in names.items() if part in parts}
            return values | {"samples_fim": parts["count"].item()}


class Examples(NamedTuple):
    """Inputs as the model sees them, before and after an attack, true and predicted labels."""

    x: Tensor
    x_adv: Tensor
    y: Tensor
    preds: Tensor
    adv_preds: Tensor


class AttackMeter:
    """Success rates of attacks, each one's and that of all together, and signs of masked gradients.

    Args:
        attacks: Attacks by name.
        input_space: What the inputs mean.
        seed: Seed of what the attacks draw.
        batch_size: Number of samples to attack at a time.
        num_examples: Number of adversarial inputs of each attack to keep, of those that succeeded; None for all inputs.

    """

    def __init__(
        self,
        attacks: Mapping[str, Callable[..., Any]],
        input_space: InputSpace,
        seed: int,
        batch_size: int,
        num_examples: int | None = 8,
    ) -> None:
        self._attacks = attacks
        self._input_space = input_space
        self._seed = seed
        self._batch_size = batch_size
        self._num_examples = num_examples
        self._tables: dict[str, Tensor] = {}
        self._is_complete = True
        self.seconds: dict[str, float] = {}
        self.examples: dict[str, Examples] = {}
        self.results: dict[str, AttackResult] = {}
        self.rates: dict[str, dict[str, float]] = {}
        self.signs: list[MaskingSign] = []

    def update(
        self, name: str, forward: Callable[..., Any], x: Tensor, y: Tensor, device: torch.device, progress: bool = False
    ) -> None:
        """Attack samples, moved to the device batch by batch, with one of the attacks."""
        start = perf_counter()
        tables = [torch.zeros(0, len(_COLUMNS), dtype=accumulation_dtype(device), device=device)]
        examples: list[Examples] = []
        batches = list(zip(x.split(self._batch_size), y.split(self._batch_size), strict=True)) if len(x) else []
        for index, (rows, labels) in enumerate(tqdm(batches, desc=f"{name} attack", leave=False, disable=not progress)):
            rows, labels = rows.to(device), labels.to(device)
            result = run(forward, self._attacks[name], rows, labels, self._input_space, self._seed, index)
            tables.append(_encode(result, labels, tables[0]))
            examples.append(self._pick(result, rows, labels, sum(len(picked.y) for picked in examples)))
        self._tables[name] = torch.cat(tables)
        if examples:
            self.examples[name] = Examples(*(torch.cat(parts) for parts in zip(*examples, strict=True)))
        self.seconds[name] = perf_counter() - start

    def drop(self, name: str) -> None:
        """Leave an attack out, and with it the worst case, for instance because it failed in another process."""
        for kept in (self._tables, self.examples, self.seconds):
            kept.pop(name, None)  # type: ignore[attr-defined]
        self._is_complete = False

    def compute(self) -> dict[str, float]:
        """Compute the values over all samples of all processes; keep results, rates and signs."""
        tables = {name: _gather(table) for name, table in self._tables.items()}
        self.results = {name: _decode(self._attacks[name], table) for name, table in tables.items()}
        # Three samples more or less are no sign, however few there are
        num_eligible = min([int(result.eligible.sum()) for result in self.results.values()], default=0)
        self.signs = masking_signs(self.results.values(), tolerance=max(0.01, 3 / max(num_eligible, 1)))
        values: dict[str, float] = {}
        for name, table in (self._with_worst(tables) if self._is_complete else tables).items():
            metric = AttackSuccessRate(sync_on_compute=False).to(table.device)
            preds, adv_preds, y = (table[:, _COLUMNS.index(part)].long() for part in ("preds", "adv_preds", "y"))
            metric.update(preds, adv_preds, y, table[:, _COLUMNS.index("l2")])
            self.rates[name] = rates = {part: value.item() for part, value in metric.compute_components().items()}
            values |= {f"asr/{name}": rates["asr"], f"adv_acc/{name}": rates["adv_acc"]}
            if rates["flipped"]:
                values[f"distortion/{name}"] = rates["distortion"]
            values |= {"masking": float(bool(self.signs)), "samples_attacks": rates["count"]}
        return values

    def _with_worst(self, tables: dict[str, Tensor]) -> dict[str, Tensor]:
        """Add the worst case: for each sample the closest success of any attack or, without one, any failure.

        An attack without a budget, as that of Carlini and Wagner, breaks nearly every sample, with perturbations of any
        size. Beside attacks with a budget, it counts where it stays within the largest of these.
        """
        if not tables:
            return tables
        y, preds, adv_preds, l2, linf = (_COLUMNS.index(name) for name in ("y", "preds", "adv_preds", "l2", "linf"))
        budgets = [budget_of(self._attacks[name], self._input_space) for name in tables]
        stacked = torch.stack(list(tables.values()))
        has_budget = torch.tensor([budget is not None for budget in budgets], device=stacked.device).unsqueeze(1)
        within = torch.zeros_like(stacked[..., l2], dtype=torch.bool) | ~has_budget.any()
        for norm, size in (budget for budget in budgets if budget is not None):
            if norm in ("l2", "linf"):
                within |= stacked[..., linf if norm == "linf" else l2] <= 1.0001 * size  # to rounding
        counts = has_budget | within
        stacked[..., adv_preds] = torch.where(counts, stacked[..., adv_preds], stacked[..., preds])
        is_wrong = stacked[..., adv_preds] != stacked[..., y]
        best = torch.where(is_wrong, stacked[..., l2], torch.inf).argmin(dim=0)
        return tables | {"worst": stacked[best, torch.arange(len(best), device=best.device)]}

    def _pick(self, result: AttackResult, x: Tensor, y: Tensor, num_picked: int) -> Examples:
        rows = torch.arange(len(x), device=x.device)
        if self._num_examples is not None:
            rows = result.success.nonzero().squeeze(1)[: max(self._num_examples - num_picked, 0)]
        return Examples(*(v[rows].cpu() for v in (x, result.x_adv, y, result.preds, result.adv_preds)))


def _default_name(attack: AttackLike) -> str:
    if isinstance(attack, str):
        return attack.removeprefix("torchattacks:").lower()
    return str(getattr(attack, "name", getattr(attack, "__name__", type(attack).__name__))).lower()


@contextmanager
def _stopwatch(meter: FeatureMeter | FisherMeter) -> Iterator[None]:
    start = perf_counter()
    yield
    meter.seconds += perf_counter() - start


def _gather(rows: Tensor) -> Tensor:
    """Rows of all processes, in the order of their ranks."""
    if not (dist.is_available() and dist.is_initialized()):
        return rows
    return torch.cat(gather_all_tensors(rows))


def _encode(result: AttackResult, y: Tensor, like: Tensor) -> Tensor:
    """One row of numbers a sample, so that one tensor is all that processes have to exchange."""
    values = {name: getattr(result, name, None) for name in _COLUMNS} | {"y": y}
    columns = [torch.nan if value is None else value for value in values.values()]
    return torch.stack([torch.as_tensor(value, device=like.device).to(like).expand(len(y)) for value in columns], dim=1)


def _decode(attack: Callable[..., Any], table: Tensor) -> AttackResult:
    column = dict(zip(_COLUMNS, table.unbind(dim=1), strict=True))
    # An attack that has nothing to do, in a batch that is wrong before, does not tell
    zero_gradients = column["zero_gradients"].nan_to_num().bool()
    return AttackResult(
        attack=attack,
        x_adv=table.new_zeros(0),
        preds=column["preds"].long(),
        adv_preds=column["adv_preds"].long(),
        eligible=column["eligible"].bool(),
        success=column["success"].bool(),
        l2=column["l2"],
        linf=column["linf"],
        queries=column["queries"].long(),
        zero_gradients=None if column["zero_gradients"].isnan().all() else zero_gradients,
        probabilities=bool(column["probabilities"].any()),
        deterministic=bool(column["deterministic"].all()),
    )
