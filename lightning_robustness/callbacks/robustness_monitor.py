from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from typing_extensions import override

from lightning_robustness._display.run_figures import history_figure
from lightning_robustness._lightning.faults import warn_of_sharding
from lightning_robustness._lightning.record import RunRecord, find_distrust, is_at_the_end
from lightning_robustness._lightning.run import Run
from lightning_robustness._lightning.settings import MonitorSettings
from lightning_robustness._lightning.sinks import announce_values, close_table
from lightning_robustness._lightning.summary import RunSummary, run_page
from lightning_robustness._lightning.trainer import check_takes_batch, check_validation, is_sharded, is_spawned
from lightning_robustness._measurement.assisted import Assisted
from lightning_robustness._measurement.keys import tag
from lightning_robustness._measurement.plan import DEFAULT_ATTACKS, Plan, name_final_attack
from lightning_robustness._model.access import Access
from lightning_robustness._processes import write_file
from lightning_robustness.attacks import Attack
from lightning_robustness.attacks.attack import Norm
from lightning_robustness.attacks.registry import Strength
from lightning_robustness.functional.fisher_spectral_norm import FisherMethod
from lightning_robustness.input_space import InputSpace
from lightning_robustness.metrics._base import Storage

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_Found = tuple[Mapping[str, float], Mapping[str, Assisted]]


class RobustnessMonitor(Callback):
    r"""Watch the robustness of a classifier while it trains, epoch by epoch.

    After every validation epoch (and under ``trainer.validate`` and ``trainer.test``) it logs RDI, ROBY, the Fisher
    information, the distance to the decision boundary, clean accuracy, and the success of attacks, as the module itself
    would, so that loggers, ``ModelCheckpoint`` and ``EarlyStopping`` see them. ``docs/monitor.md`` lists all keys. RDI
    and ROBY come from a hook on the classifier head, without another forward pass; the Fisher information and the
    attacks see a fixed sample, spread over the validation set. Training is bit for bit what it is without the monitor.

    Args:
        attacks: Names of attacks, attacks, or other callables ``(model, x, y) -> x_adv``; a mapping gives them names.
            Empty for none. Success of an attack without a budget, such as C&W, counts within the l2 budget of the
            other attacks, or ``max(eps, eps * sqrt(d) / 4)`` for inputs of d values; with ``strength="paper"`` always.
        eps: Budget of attacks that are given by name, in un-normalised units; None for their defaults, which attacks in
            the l2 norm keep unless ``norm`` is ``"l2"``.
        norm: Norm of that budget, and of attacks that are given by name and know both: ``"linf"`` or ``"l2"``.
        strength: How hard attacks by name try, ``"fast"``, ``"strong"`` or ``"paper"``: see ``attacks.get_attack``.
        attack_every_n_epochs: Attack in the first validation epoch, whenever this many epochs have passed, and at the
            end of training. A mapping has a number for each attack. By default 1 for PGD in all its forms, such as
            FGSM, and 5 for other attacks.
        final_attack: Attack for one strong verdict at the end of training, logged as ``adv_acc/final``: ``"cascade"``,
            ``"ensemble"``, another name, with ``strength="strong"``, or an attack.
        input_space: What the loader does to inputs: range and normalisation; by default, nothing, to values in [0, 1].
        num_classes: Number of classes, to be checked.
        head: The classifier head, by name or as a module; by default it is found.
        forward_fn: Callable that takes the module and inputs and returns logits, where ``module(x)`` does not.
        embed_fn: Callable that takes the module and what the loader gives, such as tokens, and returns the embeddings
            that are perturbed. ``forward_fn`` takes them to logits, or ``module(inputs_embeds=...)`` does.
        batch_fn: Callable that takes a batch and returns inputs, labels and, if need be, a dictionary of what else
            ``forward`` takes, with one row per sample.
        fim_samples: Number of samples for the Fisher information and the distance to the boundary; 0 for none.
        fim_method: How it is computed; see :func:`~lightning_robustness.functional.fisher_spectral_norm`.
        clever_samples: Number of samples for CLEVER, which takes thousands of gradients each; 0 for none.
        clever_radius: Radius of the ball in which CLEVER looks, in un-normalised units: no score is larger.
        attack_samples: Number of samples to attack; 0 for none.
        batch_size: Number of samples of these two that are worked on at a time.
        dataloader_idx: Which of several validation loaders to watch.
        seed: Seed of the sample, of random starts and directions: the same in every epoch.
        prefix: What keys start with; in ``trainer.test``, ``test_`` comes before it.
        storage: ``"exact"`` keeps all features, ``"streaming"`` bounds memory, ``"auto"`` is exact up to 1 GiB.
        log_details: Whether loggers get ``robustness_details/`` and ``robustness_trust/`` too; callbacks always do.
        roby_p: Order of the distance in ROBY, at least 1; ``float("inf")`` is allowed.
        log_figures: Whether to log pictures and histograms, where a logger takes them.
        log_combined: Whether TensorBoard opens with three charts of several lines; each line is a run of its own there.
        log_embeddings: Whether to log the embeddings of the sample to TensorBoard's projector.
        progress: Whether to show progress bars; by default, where the Trainer has one.

    Attributes:
        late_keys: Keys of values that were logged at the end of training, after the last validation epoch.

    Example:
        >>> from lightning_robustness import RobustnessMonitor
        >>> monitor = RobustnessMonitor(attacks=("pgd", "square"), eps=8 / 255, attack_every_n_epochs={"square": 10})
        >>> # Trainer(callbacks=[monitor, RobustModelCheckpoint("robustness/adv_acc/worst")])

    """

    def __init__(
        self,
        attacks: Iterable[str | Attack | Callable[..., Any]]
        | Mapping[str, str | Attack | Callable[..., Any]] = DEFAULT_ATTACKS,
        eps: float | None = 8 / 255,
        *,
        norm: Norm = "linf",
        strength: Strength = "fast",
        attack_every_n_epochs: int | Mapping[str, int] | None = None,
        final_attack: str | Attack | Callable[..., Any] | None = None,
        input_space: InputSpace | None = None,
        num_classes: int | None = None,
        head: str | nn.Module | None = None,
        forward_fn: Callable[..., Any] | None = None,
        embed_fn: Callable[..., Any] | None = None,
        batch_fn: Callable[..., Any] | None = None,
        fim_samples: int = 256,
        fim_method: FisherMethod = "auto",
        clever_samples: int = 0,
        clever_radius: float = 2.0,
        attack_samples: int = 256,
        batch_size: int = 128,
        dataloader_idx: int = 0,
        seed: int = 0,
        prefix: str = "robustness",
        storage: Storage = "auto",
        log_details: bool = True,
        roby_p: float = 2.0,
        log_figures: bool = True,
        log_combined: bool = False,
        log_embeddings: bool = False,
        progress: bool | None = None,
    ) -> None:
        access = Access(input_space, head, num_classes, forward_fn, embed_fn, batch_fn)
        plan = Plan.of(
            attacks,
            eps,
            access.input_space,
            attack_samples,
            strength,
            norm,
            fim_samples=fim_samples,
            fim_method=fim_method,
            clever_samples=clever_samples,
            clever_radius=clever_radius,
            storage=storage,
            roby_p=roby_p,
            batch_size=batch_size,
            seed=seed,
        )
        final = {} if final_attack is None or not attack_samples else name_final_attack(final_attack, eps, norm)
        logged = (log_details, log_figures, log_combined, log_embeddings)
        self.settings = MonitorSettings(access, plan, final, dataloader_idx, prefix, *logged, progress)
        self.late_keys: set[str] = set()
        self._record = RunRecord(plan.attacks, attack_every_n_epochs)
        self._run: Run | None = None
        self._is_fitting = True

    @property
    @override
    def state_key(self) -> str:
        return self._generate_state_key(prefix=self.settings.prefix)

    @property
    def history(self) -> list[dict[str, float]]:
        """One dictionary for each evaluation, with ``epoch``, ``step`` and the values without prefix."""
        return self._record.history

    @override
    def __repr__(self) -> str:
        plan, number = self.settings.plan, len(self.history)
        samples = f"attack_samples={plan.attack_samples}, fim_samples={plan.fim_samples}"
        space = f"input_space={plan.input_space!r}, prefix={self.settings.prefix!r}"
        return f"RobustnessMonitor(attacks={list(plan.attacks)}, {samples}, {space}, {number} evaluations)"

    @property
    def keys(self) -> list[str]:
        """Keys of the values that say how robust the network is, with their prefix."""
        return self.settings.keys

    def keys_under(self, trainer: Trainer) -> list[str]:
        """Return the ``keys`` that are logged with the strategy of a Trainer."""
        return self._settings_for(trainer).keys

    def reference_under(self, trainer: Trainer) -> str | None:
        """Return the key of the robust accuracy that is logged most often, by which others can be confirmed."""
        name = self._record.most_frequent_of(self._settings_for(trainer).plan.attacks)
        return None if name is None else tag(self.settings.prefix, f"adv_acc/{name}")

    def plot(self) -> "Figure":
        """Draw the curves of ``history``, with matplotlib, which the extra ``plot`` brings."""
        return history_figure(self.history, self.settings.prefix, kept=self._record.kept())

    def to_html(self, path: str | Path | None = None) -> str:
        """Return ``history`` as a self-contained page, and write it to a file if a path is given.

        Raises:
            ModuleNotFoundError: If matplotlib is not installed; the extra ``plot`` brings it.

        """
        page = run_page(self.history, self.settings, self.plot(), self.summary()).to_html()
        if path is not None:
            write_file(path, page.encode())
        return page

    def summary(self) -> RunSummary:
        """Summarise ``history`` in five lines; its ``table()`` has the epochs that attack-free values would pick."""
        record, space = self._record, self.settings.plan.input_space
        return RunSummary.of(self.history, space, record.kept(), record.notes)

    @override
    def state_dict(self) -> dict[str, Any]:
        return self._record.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._is_fitting:  # `validate` and `test` load checkpoints too, which must not cut the history short
            self._record.load_state_dict(state_dict)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._is_fitting, self.late_keys = stage == "fit", set()
        check_takes_batch(pl_module, "test_step" if stage == "test" else "validation_step", self)
        if self._is_fitting:
            check_validation(trainer)
            self._record.begin(trainer)
        warn_of_sharding(trainer, self.settings)
        self._run = Run(self._settings_for(trainer), trainer)
        if self._is_fitting:
            with self._run.faults.skipping("the HParams tab lacks the values", is_raised_early=True):
                announce_values(trainer, pl_module, self._run.settings)

    @override
    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._run is not None:
            self._run.close_epoch()

    @override
    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self._run is not None and dataloader_idx == self.settings.dataloader_idx:
            self._run.before_batch(batch)

    @override
    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self._run is not None and dataloader_idx == self.settings.dataloader_idx:
            self._run.after_batch()

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._run is None:
            return
        if trainer.sanity_checking:
            self._run.end_sanity_check()
            return
        self._run.epoch = trainer.current_epoch
        values, collisions = self._evaluate(self._run, trainer), self._run.find_collisions()
        values = {name: value for name, value in values.items() if tag(self._run.prefix, name) not in collisions}
        self._run.log(values, self._record.most_frequent_of(self._run.settings.plan.attacks))

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # The module's own hook for the end of the epoch, in which it may log, comes after ours
        if self._run is not None and trainer.sanity_checking:
            self._run.find_collisions()

    on_test_epoch_start = on_validation_epoch_start
    on_test_batch_start = on_validation_batch_start
    on_test_batch_end = on_validation_batch_end
    on_test_epoch_end = on_validation_epoch_end

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        run = self._run
        if run is None:
            return
        if run.found is None:
            run.faults.warn("there was no validation epoch to watch in this run.", key="validation")
        with run.faults.skipping("attacks at the end of training are left out"):
            self._attack_at_the_end(run, trainer)
        if self.history:
            with run.faults.skipping("the HParams tab lacks the values", is_raised_early=True):
                close_table(trainer, run.settings)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._run is None or not self.history:
            return
        with self._run.faults.skipping("the summary of the run is left out"):  # checkpoints have judged what came last
            self._record.close(trainer, self._run.prefix, self._run.faults.left_out)
            rank_zero_info(f"RobustnessMonitor:\n{self.summary()}")
            self._run.board.show_summary(self.summary().lines(), self.history, self._record.kept())

    def _attack_at_the_end(self, run: Run, trainer: Trainer) -> None:
        missing = [name for name in self._record.missing(trainer) if name in run.settings.plan.attacks]
        if not (missing or run.settings.final):
            return
        run.epoch = max(trainer.current_epoch - 1, 0)  # it is one ahead when training has ended
        found = run.attack_at_the_end(missing)
        if not found[0]:
            return
        values = self._add(run, trainer, found, missing)
        logged = {tag(run.prefix, key): value for key, value in values.items()}
        run.hand_over(logged)
        trainer.callback_metrics.update({key: torch.tensor(value) for key, value in logged.items()})
        self.late_keys = set(logged)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._run is not None:
            self._run.close_epoch()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and is_spawned(trainer) and trainer.is_global_zero:
            self._record.send()
        if self._run is not None:
            self._run.close_epoch()
        self._run = None

    def _settings_for(self, trainer: Trainer) -> MonitorSettings:
        return self.settings.without_gradients() if is_sharded(trainer) else self.settings

    def _evaluate(self, run: Run, trainer: Trainer) -> dict[str, float]:
        due = [name for name in self._record.due(trainer) if name in run.settings.plan.attacks]
        findings = run.end_epoch(due, is_at_the_end(trainer))
        if findings is None:
            return {"skipped": 1.0}
        return self._add(run, trainer, (findings.values | {"skipped": 0.0}, findings.estimates), due)

    def _add(self, run: Run, trainer: Trainer, found: _Found, attacks: list[str]) -> dict[str, float]:
        """Add the values of an evaluation to the record, and show the run so far."""
        added = dict(found[0])
        with run.faults.skipping("trust and the picture of the run are left out", is_raised_early=True):
            added = self._record.add(trainer, run.epoch, *found, attacks)
            if trainer.state.fn != "fit":
                return added
            for key, message in find_distrust(trainer, run.prefix, self._record.trust) if attacks else ():
                run.faults.warn(message, key)
            taken = run.board.show_history(self.history, added, self._record.kept())
            for entry in (added, self.history[-1]):
                entry["seconds/figures"] = entry.get("seconds/figures", 0.0) + taken
        return added
