"""An evaluation under way, part by part."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_robustness.attacks import Budget
from lightning_robustness.evaluation.adversarial_example import AdversarialExample, make_examples
from lightning_robustness.evaluation.chunks import gather_rows, measure_chunks
from lightning_robustness.evaluation.class_accuracy import ClassAccuracy, class_accuracies
from lightning_robustness.evaluation.decision_space import DecisionSpace, Projection, embed_batch, project
from lightning_robustness.evaluation.example_pass import attack_examples
from lightning_robustness.evaluation.feature_pass import FeaturePass
from lightning_robustness.evaluation.processes import Processes
from lightning_robustness.evaluation.resume import Records
from lightning_robustness.evaluation.robustness_report import RobustnessReport
from lightning_robustness.evaluation.sweep_report import SweepReport
from lightning_robustness.evaluation.sweep_samples import sweep_samples
from lightning_robustness.measurement.attack_meter import AttackMeter
from lightning_robustness.measurement.attack_outcome import AttackOutcome
from lightning_robustness.measurement.meter import SampleMeter, without_update_warning
from lightning_robustness.measurement.subject import Samples, Subject
from lightning_robustness.measurement.threat_model import ThreatModel
from lightning_robustness.utilities.input_space import InputSpace
from lightning_robustness.utilities.rank_zero import rank_zero_warn


class Part(NamedTuple):
    """A part of an evaluation: what it measures, within a sentence, and how."""

    label: str
    measure: Callable[[], None]


class EvaluationRun:
    """An evaluation under way: each part adds to what there is, and the report is made of that.

    Every part runs in all processes: each measures its share, and then has the results of all.

    Args:
        model: The model.
        features: The pass over all samples.
        attacks: Attacks by name.
        attack_samples: Number of samples to attack.
        input_space: Range and normalisation of the inputs.
        processes: The processes that evaluate together.
        records: Finished results.
        budget: Budget of the run, within which attacks that look for the smallest perturbation count.

    """

    def __init__(
        self,
        model: nn.Module,
        features: FeaturePass,
        attacks: Mapping[str, Callable[..., Any]],
        attack_samples: int,
        input_space: InputSpace,
        processes: Processes,
        records: Records,
        budget: Budget | None = None,
    ) -> None:
        self._model, self._features, self._processes, self._records = model, features, processes, records
        self._named, self._input_space = attacks, input_space
        self._attacks = AttackMeter(attacks, input_space, budget, num_examples=0, gathers=False)
        self._outcomes: dict[str, AttackOutcome] = {}
        self._examples: list[AdversarialExample] = []
        self._attack_samples = attack_samples
        self._seconds: dict[str, float] = {}
        self._measured: list[SampleMeter] = []
        self._positions: dict[str, Tensor] = {}
        self._attacked = torch.zeros(0, dtype=torch.long)
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

    def measure_features(self, dataloader: Iterable[Any]) -> None:
        """Go through the loader: RDI, ROBY and accuracy of all samples, and the sample for the other parts."""
        self._features.run(dataloader)

    def measure_sample(self, meter: SampleMeter) -> None:
        """Measure a part of the sample without attacks."""
        if self._features.is_discrete:
            return
        subject, samples = self._features.subject, self._take(meter.size)
        meter.to(subject.device)
        measure = partial(_measure_batch, copy.deepcopy(meter), subject)
        finished = measure_chunks(
            self._processes, self._records, meter.name, subject, samples, measure, meter.title, meter.batch_size
        )
        for chunk in finished.chunks:
            meter.add(chunk.values)
        meter.seconds += finished.seconds
        positions = [chunk.positions for chunk in finished.chunks]
        self._positions[meter.name] = torch.cat([torch.zeros(0, dtype=torch.long), *positions])
        self._measured.append(meter)
        if finished.is_interrupted:
            raise KeyboardInterrupt

    def attack(self, name: str) -> None:
        """Run one of the attacks."""
        if self._features.is_discrete:
            return
        subject, samples = self._features.subject, self._take(self._attack_samples)

        def measure(batch: Samples) -> dict[str, Tensor]:
            return self._attacks.measure(name, subject, batch)._asdict()

        part, title = f"attack {name}", f"{name} attack"
        finished = measure_chunks(self._processes, self._records, part, subject, samples, measure, title)
        if finished.is_interrupted:
            raise KeyboardInterrupt  # the worst of some samples is not the worst of all
        rows = gather_rows(self._processes, finished)
        outcome = AttackOutcome(**rows.values) if rows.values else AttackOutcome.empty(torch.device("cpu"))
        self._attacks.add(name, outcome, rows.seconds)
        self._outcomes[name], self._attacked = outcome.counted(), rows.positions

    def show_examples(self, number: int) -> None:
        """Draw samples that the first attack with a budget broke or, without such an attack, the first one."""
        if not self._features.is_image:
            return
        threat = self._threat_model()
        found = [name for name, outcome in self._outcomes.items() if outcome.success.any()]
        bounded = [name for name in found if threat.attacks[name].budgets]
        for name in [*bounded, *found][:1]:
            broken = self._attacked[self._outcomes[name].success][:number]
            samples = self._take(self._attack_samples)
            attack, subject = self._named[name], self._features.subject
            examples = attack_examples(name, attack, subject, samples, broken, self._processes)
            if examples is not None:
                self._examples = make_examples(name, examples, self._input_space)

    def sweep(self, plan: Sequence[Mapping[str, Callable[..., Any]]], eps: Sequence[float]) -> None:
        """Attack with increasing budgets."""
        if self._features.is_discrete:
            return
        subject, samples = self._features.subject, self._take(self._attack_samples)
        sweep = sweep_samples(subject, samples, plan, eps, self._processes, self._records)
        self._sweep = sweep if sweep.samples else None
        self._seconds["sweep"] = sum(sweep.seconds.values())
        if sweep.interrupted:
            raise KeyboardInterrupt

    def project(self, attacks: Mapping[str, Callable[..., Any]], method: Projection) -> None:
        """Project embeddings of clean and adversarial samples."""
        if self._features.head is None or self._features.is_discrete:
            return  # a warning has said that there are no embeddings, or no attacks
        ((name, attack),) = attacks.items()
        subject, samples = self._features.subject, self._take(self._attack_samples)
        route, title = self._features.route, "decision space"
        tap = None if route is None else route.tap(self._model)

        def measure(batch: Samples) -> dict[str, Tensor]:
            return {} if tap is None else embed_batch(subject, tap, attack, batch)  # without samples, there is no tap

        finished = measure_chunks(self._processes, self._records, title, subject, samples, measure, title)
        if finished.is_interrupted:
            raise KeyboardInterrupt
        rows = gather_rows(self._processes, finished)
        with self._processes.step():
            self._decision_space = project(rows.values, subject, attack, name, method)
        self._seconds["decision_space"] = rows.seconds

    def report(self, settings: dict[str, str], per_sample: bool, origin: dict[str, str]) -> RobustnessReport:
        """Make a report of what there is, the same in all processes."""
        features = self._features
        metrics = dict(features.values or {})
        seconds = {} if features.values is None else {"features": features.seconds}
        with without_update_warning():
            for meter in self._measured:
                metrics |= meter.compute()
                seconds[meter.name] = meter.seconds
        metrics |= self._attacks.compute()
        seconds |= self._seconds | self._attacks.seconds
        slowest = self._processes.gather(seconds)
        metrics |= {f"seconds/{name}": max(own[name] for own in slowest) for name in seconds}
        return RobustnessReport(
            model=type(self._model).__name__,
            num_classes=features.num_classes,
            metrics=metrics,
            rates=self._attacks.rates,
            signs=self._attacks.signs,
            settings={**({"head": features.head or "none"} if features.values is not None else {}), **settings},
            interrupted=self._interrupted,
            per_sample=self._per_sample() if per_sample else None,
            sweep=self._sweep if per_sample or self._sweep is None else self._sweep.without_samples(),
            decision_space=self._decision_space,
            boundary=next((curve for meter in self._measured if (curve := meter.curve()) is not None), None),
            threat_model=self._threat_model(),
            classes=self._class_accuracies(),
            adversarial_examples=self._examples,
            provenance=self._processes.gather(origin)[0],
        )

    def _threat_model(self) -> ThreatModel:
        outcomes = self._outcomes  # of the attacks that were finished
        queries = {name: outcome.queries.double().mean().item() for name, outcome in outcomes.items()}
        finished = {name: self._named[name] for name in outcomes}
        is_image, l2_budget = self._features.is_image, self._attacks.l2_budget
        return ThreatModel.of(finished, self._input_space, len(self._attacked), is_image, queries, l2_budget)

    def _class_accuracies(self) -> list[ClassAccuracy]:
        return [] if self._attacks.worst is None else class_accuracies(self._attacks.worst)

    def _take(self, size: int) -> Samples:
        if self._features.sample is None:
            raise RuntimeError("The features have to be measured first.")
        return self._features.sample.take(size)

    def _per_sample(self) -> dict[str, list[Any]]:
        columns: dict[str, list[Any]] = {}
        for meter in self._measured:
            positions = torch.cat(self._processes.gather(self._positions[meter.name]))
            order = positions.argsort()
            for name, values in meter.per_sample().items():
                columns |= {f"{name}_index": positions[order].tolist(), name: torch.tensor(values)[order].tolist()}
        outcomes = self._attacks.outcomes
        if outcomes:
            first = next(iter(outcomes.values()))
            columns |= {"index": self._attacked.tolist(), "y": first.y.tolist(), "preds": first.preds.tolist()}
        for name, outcome in outcomes.items():
            columns |= {f"{part}/{name}": getattr(outcome, part).tolist() for part in ("adv_preds", "l2", "linf")}
        return columns


def _measure_batch(meter: SampleMeter, subject: Subject, batch: Samples) -> dict[str, Tensor]:
    """Measure a batch with a copy of a meter that has not measured anything."""
    own = copy.deepcopy(meter)
    own.measure(subject, batch)
    return own.state()
