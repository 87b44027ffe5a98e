"""An evaluation under way, part by part."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from time import perf_counter
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_robustness.attacks.budget import budgets_of
from lightning_robustness.evaluation.adversarial_example import make_examples
from lightning_robustness.evaluation.class_accuracy import ClassAccuracy, class_accuracies
from lightning_robustness.evaluation.decision_space import DecisionSpace, Projection, project
from lightning_robustness.evaluation.loading import EMPTY, iterate
from lightning_robustness.evaluation.robustness_report import RobustnessReport
from lightning_robustness.evaluation.sweep import sweep_samples
from lightning_robustness.evaluation.sweep_report import SweepReport
from lightning_robustness.measurement.attack_meter import AttackMeter
from lightning_robustness.measurement.attack_outcome import worst_case
from lightning_robustness.measurement.feature_meter import FeatureMeter
from lightning_robustness.measurement.fixed_sample import FixedSample
from lightning_robustness.measurement.inspection import inspect_model, open_inputs, warn_of_unused_layers
from lightning_robustness.measurement.meter import SampleMeter
from lightning_robustness.measurement.subject import Samples, Subject
from lightning_robustness.measurement.threat_model import ThreatModel, is_image
from lightning_robustness.metrics.class_statistics import Mode
from lightning_robustness.utilities.batch import require_labels
from lightning_robustness.utilities.extra_inputs import find_extra_inputs
from lightning_robustness.utilities.loader_share import loader_share
from lightning_robustness.utilities.logits import pick_entry
from lightning_robustness.utilities.logits_route import Route
from lightning_robustness.utilities.rank_zero import rank_zero_warn
from lightning_robustness.utilities.sample import SpreadSample


class Part(NamedTuple):
    """A part of an evaluation: what it measures, within a sentence, and how."""

    label: str
    measure: Callable[[], None]


class EvaluationRun:
    """An evaluation under way: each part adds to what there is, and the report is made of that.

    Args:
        model: The model.
        subject: What computes its logits, and how to go through samples.
        meters: Meters of the sample.
        attacks: Attacks by name.
        attack_samples: Number of samples to attack.
        num_examples: Number of adversarial examples to keep.

    """

    def __init__(
        self,
        model: nn.Module,
        subject: Subject,
        meters: Sequence[SampleMeter],
        attacks: Mapping[str, Callable[..., Any]],
        attack_samples: int,
        num_examples: int = 0,
    ) -> None:
        self._model, self._subject, self._meters = model, subject, meters
        self._named = attacks
        self._attacks = AttackMeter(attacks, subject.input_space, num_examples)
        self._attack_samples = attack_samples
        self._route: Route | None = None
        self._is_discrete = self._is_image = False
        self._sample: FixedSample | None = None
        self._seconds: dict[str, float] = {}
        self._features: FeatureMeter | None = None
        self._measured: list[SampleMeter] = []
        self._sweep: SweepReport | None = None
        self._decision_space: DecisionSpace | None = None
        self._interrupted: str | None = None

    def measure(self, parts: Iterable[Part]) -> None:
        """Measure one part after the other, until the user interrupts."""
        for part in parts:
            try:
                part.measure()
            except KeyboardInterrupt:
                self._interrupted = part.label
                rank_zero_warn(
                    f"The evaluation was interrupted while it measured {part.label}: its report has what was finished."
                )
                return

    def measure_features(
        self,
        dataloader: Iterable[Any],
        batch_fn: Callable[..., Any] | None,
        head: str | nn.Module | None,
        num_classes: int | None,
        mode: Mode,
    ) -> None:
        """Go through the loader: RDI, ROBY and accuracy of all samples, and the sample for the other parts."""
        start, subject = perf_counter(), self._subject
        size = max(1, self._attack_samples, *(meter.size for meter in self._meters))
        sample = SpreadSample(size, loader_share(dataloader).total, subject.seed)
        with closing(iterate(self._model, dataloader, batch_fn, sample, subject.seed, subject.progress)) as batches:
            for x, y, name, extras in batches:
                if self._attack_samples:
                    require_labels(y, "attacks", otherwise="measure without them: `attacks=()`")
                x, y = x.to(subject.device), None if y is None else y.to(subject.device)
                if self._route is None:
                    route = self._inspect(x, y, name, extras, head, num_classes)
                    meter = FeatureMeter(route.num_classes, mode, subject.device, route.head is not None)
                    tap, subject = route.tap(self._model), self._subject
                if subject.extra is not None:
                    subject.extra.values = extras
                meter.update(tap.run(subject.from_loader, x), y)
                self._features = meter  # only now is there something to report
                self._seconds["features"] = perf_counter() - start
        if self._features is None:
            raise ValueError(EMPTY)
        self._sample = FixedSample(sample, names=() if subject.extra is None else subject.extra.names)

    def _inspect(
        self,
        x: Tensor,
        y: Tensor | None,
        name: str | None,
        extras: Mapping[str, Tensor],
        head: str | nn.Module | None,
        num_classes: int | None,
    ) -> Route:
        subject = self._subject
        self._is_image = is_image(x) and subject.embed is None
        extra = find_extra_inputs(subject.forward, "inputs_embeds" if subject.embed else name, extras)
        if extra is not None:
            extra.values = {key: value[:2] for key, value in extras.items()}
            subject = replace(subject, forward=extra.bind(subject.forward), extra=extra)
        loaded = replace(subject, forward=subject.from_loader)
        self._route = inspect_model(self._model, loaded, x, y, head, num_classes)
        if self._subject.forward is self._model:  # without a `forward_fn`
            warn_of_unused_layers(self._model, self._route)
        self._subject = replace(subject, forward=pick_entry(subject.forward, self._route.entry))
        if self._attack_samples or any(meter.size for meter in self._meters):
            self._is_discrete = open_inputs(subject, x, extras) is None
        return self._route

    def measure_sample(self, meter: SampleMeter) -> None:
        """Measure a part of the sample without attacks."""
        if self._is_discrete:
            return
        self._measured.append(meter)
        meter.update(self._subject, self._take(meter.size))

    def attack(self, name: str) -> None:
        """Run one of the attacks."""
        if self._is_discrete:
            return
        try:
            self._attacks.update(name, self._subject, self._take(self._attack_samples))
        except KeyboardInterrupt:
            self._attacks.drop(name)  # the worst of some is not the worst of all
            raise

    def sweep(self, plan: Sequence[Mapping[str, Callable[..., Any]]], eps: Sequence[float]) -> None:
        """Attack with increasing budgets."""
        if self._is_discrete:
            return
        sweep = sweep_samples(self._subject, self._take(self._attack_samples), plan, eps)
        self._sweep = sweep if sweep.samples else None
        self._seconds["sweep"] = sum(sweep.seconds.values())
        if sweep.interrupted:
            raise KeyboardInterrupt

    def project(self, attacks: Mapping[str, Callable[..., Any]], method: Projection) -> None:
        """Project embeddings of clean and adversarial samples."""
        start, route = perf_counter(), self._found()
        if route.head is None or self._is_discrete:
            return  # a warning has said that there are no embeddings, or no attacks
        ((name, attack),) = attacks.items()
        tap = route.tap(self._model)
        samples = self._take(self._attack_samples)
        self._decision_space = project(self._subject, tap, samples, attack, name, method)
        self._seconds["decision_space"] = perf_counter() - start

    def report(
        self, settings: dict[str, str], per_sample: bool, provenance: dict[str, str] | None = None
    ) -> RobustnessReport:
        """Make a report of what there is."""
        metrics = {} if self._features is None else self._features.compute()
        for meter in self._measured:
            metrics |= meter.compute()
            self._seconds[meter.name] = meter.seconds
        metrics |= self._attacks.compute()
        self._seconds |= self._attacks.seconds
        metrics |= {f"seconds/{name}": value for name, value in self._seconds.items()}
        has_features = self._features is not None
        threat, space = self._threat_model(), self._subject.input_space
        return RobustnessReport(
            model=type(self._model).__name__,
            num_classes=self._route.num_classes if self._route is not None else 0,
            metrics=metrics,
            rates=self._attacks.rates,
            signs=self._attacks.signs,
            settings={**({"head": self._found().head or "none"} if has_features else {}), **settings},
            interrupted=self._interrupted,
            per_sample=self._per_sample() if per_sample else None,
            sweep=self._sweep if per_sample or self._sweep is None else self._sweep.without_samples(),
            decision_space=self._decision_space,
            boundary=next((curve for meter in self._measured if (curve := meter.curve()) is not None), None),
            threat_model=threat,
            classes=self._class_accuracies(),
            adversarial_examples=make_examples(self._attacks.examples, threat, space) if self._is_image else [],
            provenance=provenance or {},
        )

    def _threat_model(self) -> ThreatModel:
        outcomes = self._attacks.outcomes  # of the attacks that were finished
        queries = {name: outcome.queries.double().mean().item() for name, outcome in outcomes.items()}
        samples = max((len(outcome.y) for outcome in outcomes.values()), default=0)
        finished = {name: self._named[name] for name in outcomes}
        return ThreatModel.of(finished, self._subject.input_space, samples, self._is_image, queries)

    def _class_accuracies(self) -> list[ClassAccuracy]:
        outcomes = self._attacks.outcomes
        if not outcomes or outcomes.keys() != self._named.keys():
            return []
        budgets = {name: budgets_of(attack, self._subject.input_space) for name, attack in self._named.items()}
        return class_accuracies(worst_case(outcomes, budgets))

    def _found(self) -> Route:
        if self._route is None:
            raise RuntimeError("The features have to be measured first.")
        return self._route

    def _take(self, size: int) -> Samples:
        if self._sample is None:
            raise RuntimeError("The features have to be measured first.")
        return self._sample.take(size)

    def _per_sample(self) -> dict[str, list[Any]]:
        columns: dict[str, list[Any]] = {}
        for meter in self._measured:
            for name, values in meter.per_sample().items():
                columns |= {f"{name}_index": self._take(meter.size).positions[: len(values)].tolist(), name: values}
        outcomes = self._attacks.outcomes
        if outcomes:
            first = next(iter(outcomes.values()))
            columns |= {"index": self._take(self._attack_samples).positions.tolist()}
            columns |= {"y": first.y.tolist(), "preds": first.preds.tolist()}
        for name, outcome in outcomes.items():
            columns |= {f"{part}/{name}": getattr(outcome, part).tolist() for part in ("adv_preds", "l2", "linf")}
        return columns
