"""An evaluation under way, part by part."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm  # type: ignore[import-untyped]

from lightning_robustness.evaluation.decision_space import DecisionSpace, Projection, project
from lightning_robustness.evaluation.loading import EMPTY, NO_LABELS, iterate
from lightning_robustness.evaluation.measurement import AttackMeter, FeatureMeter, FisherMeter
from lightning_robustness.evaluation.robustness_report import RobustnessReport
from lightning_robustness.evaluation.sweep import sweep_samples
from lightning_robustness.evaluation.sweep_report import SweepReport
from lightning_robustness.metrics import CleverScore
from lightning_robustness.metrics.class_statistics import Mode
from lightning_robustness.utilities.head import HeadTap, find_head
from lightning_robustness.utilities.input_space import InputSpace
from lightning_robustness.utilities.loader_share import loader_share
from lightning_robustness.utilities.logits import are_probabilities, compute_logits
from lightning_robustness.utilities.rank_zero import rank_zero_warn
from lightning_robustness.utilities.sample import SpreadSample
from lightning_robustness.utilities.sandbox import sandbox


class SampleSizes(NamedTuple):
    """Numbers of samples."""

    fim: int
    attack: int
    clever: int


class _Rows(NamedTuple):
    """Which rows of the sample they are."""

    fim: Tensor
    attack: Tensor
    clever: Tensor


class EvaluationRun:
    """An evaluation under way: each part adds to what there is, and the report is made of that."""

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[..., Any],
        input_space: InputSpace,
        sizes: SampleSizes,
        batch_size: int,
        device: torch.device,
        seed: int,
        progress: bool,
    ) -> None:
        self._model, self._forward, self._input_space = model, forward, input_space
        self._sizes, self._batch_size, self._device = sizes, batch_size, device
        self._seed, self._progress = seed, progress
        self._tap: HeadTap
        self._num_classes = 0
        self._seconds: dict[str, float] = {}
        self._features: FeatureMeter | None = None
        self._fisher: FisherMeter | None = None
        self._clever: CleverScore | None = None
        self._attacks: AttackMeter | None = None
        self._sweep: SweepReport | None = None
        self._space: DecisionSpace | None = None
        self._interrupted: str | None = None

    def measure(self, parts: Mapping[str, Callable[[], None]]) -> None:
        """Measure one part after the other, until the user interrupts."""
        try:
            for name, part in parts.items():
                self._interrupted = name
                part()
            self._interrupted = None
        except KeyboardInterrupt:
            rank_zero_warn(
                f"The evaluation was interrupted while it measured {self._interrupted}: its report has what was "
                "finished."
            )

    def measure_features(
        self,
        dataloader: Iterable[Any],
        batch_fn: Callable[..., Any] | None,
        head: str | nn.Module | None,
        num_classes: int | None,
        mode: Mode,
        needs_labels: bool,
    ) -> None:
        """Go through the loader: RDI, ROBY and accuracy of all samples, and the sample for the other parts."""
        start, meter = perf_counter(), None
        sample = SpreadSample(max(1, *self._sizes), loader_share(dataloader).total, self._seed)
        with closing(iterate(self._model, dataloader, batch_fn, sample, self._seed, self._progress)) as batches:
            for x, y in batches:
                if needs_labels and y is None:
                    raise ValueError(f"{NO_LABELS} Or measure without attacks: `attacks=()`.")
                x, y = x.to(self._device), None if y is None else y.to(self._device)
                if meter is None:
                    self._tap = self._inspect(x, head, num_classes)
                    meter = FeatureMeter(self._num_classes, mode, self._device)
                meter.update(self._tap.run(self._forward, x), y)
                self._features = meter  # only now is there something to report
                self._seconds["features"] = perf_counter() - start
        if self._features is None:
            raise ValueError(EMPTY)
        self._x, y = sample.collect()
        if y is not None:
            self._y = y
        self._indices = torch.as_tensor(sample.indices)
        self._rows = _Rows(*(torch.as_tensor(sample.rows(size)) for size in self._sizes))

    def measure_fisher(self, meter: FisherMeter) -> None:
        """Measure the Fisher information of its sample."""
        self._fisher = meter
        self._fisher.update(self._forward, self._x[self._rows.fim], self._device, self._progress)

    def measure_clever(self, metric: CleverScore) -> None:
        """Measure CLEVER, sample by sample, since each takes long."""
        start = perf_counter()
        self._clever = metric.to(self._device)
        for row in tqdm(self._x[self._rows.clever], desc="CLEVER", leave=False, disable=not self._progress):
            self._clever.update(self._forward, row.unsqueeze(0).to(self._device))
            self._seconds["clever"] = perf_counter() - start

    def attack(self, attacks: Mapping[str, Callable[..., Any]], name: str) -> None:
        """Run one of the attacks."""
        if self._attacks is None:
            self._attacks = AttackMeter(attacks, self._input_space, self._seed, self._batch_size, num_examples=0)
        try:
            self._attacks.update(name, self._forward, *self._attacked(), self._device, self._progress)
        except KeyboardInterrupt:
            self._attacks.drop(name)  # the worst of some is not the worst of all
            raise

    def sweep(self, plan: Sequence[Mapping[str, Callable[..., Any]]], eps: Sequence[float]) -> None:
        """Attack with increasing budgets."""
        sweep = sweep_samples(
            self._forward,
            *self._attacked(),
            self._indices[self._rows.attack],
            plan,
            eps,
            self._input_space,
            self._batch_size,
            self._device,
            self._seed,
            self._progress,
        )
        self._sweep = sweep if sweep.samples else None
        self._seconds["sweep"] = sum(sweep.seconds.values())
        if sweep.interrupted:
            raise KeyboardInterrupt

    def project(self, attacks: Mapping[str, Callable[..., Any]], method: Projection) -> None:
        """Project embeddings of clean and adversarial samples."""
        start = perf_counter()
        ((name, attack),) = attacks.items()
        self._space = project(
            self._forward,
            self._tap,
            *self._attacked(),
            attack,
            name,
            method,
            input_space=self._input_space,
            batch_size=self._batch_size,
            device=self._device,
            seed=self._seed,
        )
        self._seconds["decision_space"] = perf_counter() - start

    def report(self, settings: dict[str, str], per_sample: bool) -> RobustnessReport:
        """Make a report of what there is."""
        metrics = {} if self._features is None else self._features.compute()
        if self._fisher is not None:
            values = self._fisher.compute()
            metrics |= values if values["samples_fim"] else {}
            self._seconds["fim"] = self._fisher.seconds
        if self._clever is not None and self._clever.count:
            metrics |= {"clever": self._clever.compute().item(), "samples_clever": self._clever.count.item()}
        if self._attacks is not None:
            metrics |= self._attacks.compute()
            self._seconds |= self._attacks.seconds
        metrics |= {f"seconds/{name}": value for name, value in self._seconds.items()}
        return RobustnessReport(
            model=type(self._model).__name__,
            num_classes=self._num_classes,
            metrics=metrics,
            rates={} if self._attacks is None else self._attacks.rates,
            signs=[] if self._attacks is None else self._attacks.signs,
            settings={**({} if self._features is None else {"head": self._tap.name}), **settings},
            interrupted=self._interrupted,
            per_sample=self._per_sample() if per_sample else None,
            sweep=self._sweep if per_sample or self._sweep is None else self._sweep.without_samples(),
            decision_space=self._space,
        )

    def _inspect(self, x: Tensor, head: str | nn.Module | None, num_classes: int | None) -> HeadTap:
        """Find the head, and try on a few samples what can be wrong."""
        self._input_space.check(x)
        with sandbox(self._forward, x[:2]) as (few,), torch.no_grad():
            logits = compute_logits(self._forward, few)
        if are_probabilities(logits):
            rank_zero_warn(
                f"The outputs of {type(self._model).__name__} look like probabilities. Attacks and the Fisher "
                "information need logits: return what enters the softmax, or pass a `forward_fn=` that does."
            )
        tap = HeadTap(self._model, find_head(self._model, x[:2], self._forward, head))
        self._num_classes = tap.run(self._forward, x[:2]).logits.shape[1]
        if num_classes not in (None, self._num_classes):
            raise ValueError(
                f"Expected {num_classes} classes, as `num_classes` or the models before say, but the head {tap.name!r} "
                f"has {self._num_classes}."
            )
        return tap

    def _attacked(self) -> tuple[Tensor, Tensor]:
        return self._x[self._rows.attack], self._y[self._rows.attack]

    def _per_sample(self) -> dict[str, list[Any]]:
        columns: dict[str, list[Any]] = {}
        if self._fisher is not None:
            values = self._fisher.values.tolist()
            columns |= {"fim_index": self._indices[self._rows.fim][: len(values)].tolist(), "fim": values}
        results = {} if self._attacks is None else self._attacks.results
        if results:
            first = next(iter(results.values()))
            columns |= {"index": self._indices[self._rows.attack].tolist()}
            columns |= {"y": self._attacked()[1].tolist(), "preds": first.preds.tolist()}
        for name, result in results.items():
            columns |= {f"{part}/{name}": getattr(result, part).tolist() for part in ("adv_preds", "l2", "linf")}
        return columns
