import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from typing_extensions import override

from lightning_robustness.attacks import Attack, budget_of, run
from lightning_robustness.callbacks.board import Board, describe_eps
from lightning_robustness.callbacks.figures import history_figure
from lightning_robustness.callbacks.trainer_access import (
    check_order,
    check_strategy,
    check_validation,
    evaluation_loader,
    forward_of,
    has_trained,
    log_step,
)
from lightning_robustness.callbacks.validation_watch import ValidationWatch
from lightning_robustness.evaluation.measurement import AttackMeter, FeatureMeter, FisherMeter, name_attacks
from lightning_robustness.functional.fisher_spectral_norm import FisherMethod
from lightning_robustness.metrics.class_statistics import Mode
from lightning_robustness.utilities.batch import read_batch
from lightning_robustness.utilities.checks import check_integer
from lightning_robustness.utilities.head import HeadTap, find_head
from lightning_robustness.utilities.input_space import InputSpace
from lightning_robustness.utilities.loader_share import loader_share
from lightning_robustness.utilities.logits import are_probabilities, compute_logits
from lightning_robustness.utilities.rank_zero import rank_zero_warn
from lightning_robustness.utilities.sample import SpreadSample
from lightning_robustness.utilities.sandbox import sandbox

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class _Sample(NamedTuple):
    """The sample of this process, and which of its rows attacks and the Fisher information see."""

    x: Tensor
    y: Tensor | None
    attack_rows: Tensor
    fim_rows: Tensor


class RobustnessMonitor(Callback):
    r"""Watch the robustness of a classifier while it trains, epoch by epoch.

    After every validation epoch (and under ``trainer.validate`` and ``trainer.test``) it logs as the module itself
    would, so that loggers, ``ModelCheckpoint`` and ``EarlyStopping`` see the values:

    ===========================  ==============================================================  ============
    key                          value                                                           more robust
    ===========================  ==============================================================  ============
    ``rdi``                      RDI of the logits                                               higher
    ``rdi_intra``, ``rdi_inter`` the two distances that it compares                              lower, higher
    ``rdi_embedding``            RDI of what enters the head                                     see the docs
    ``roby``, ``fsa``, ``fsd``   ROBY and its parts                                              lower, higher, higher
    ``fim``                      mean spectral norm of the Fisher information                    lower
    ``fim_inverse``              mean of its inverse                                             see the docs
    ``fim_geometric``            its geometric mean                                              see the docs
    ``lipschitz``                local Lipschitz constant, where the Jacobian is exact           lower
    ``acc``                      clean accuracy, where there are labels
    ``asr/<attack>``             success rate of an attack; ``asr/worst``: of all together       lower
    ``adv_acc/<attack>``         accuracy under an attack; ``adv_acc/worst``                     higher
    ``distortion/<attack>``      mean Euclidean size of the perturbations that succeeded         higher
    ``masking``                  1 where a sign says that gradients are masked
    ``skipped``                  1 where the epoch was left out, for NaN for instance
    ``samples``, ``samples_*``   number of samples of each part
    ``seconds/<part>``           what watching took: features, fim, each attack, figures
    ===========================  ==============================================================  ============

    All have the ``prefix`` in front, in ``trainer.test`` also ``test_``. Features come from a hook on the classifier
    head while ``validation_step`` runs, without another forward pass. The Fisher information and the attacks see a
    fixed sample, spread over the whole validation set. Nothing that happens here changes training: weights, buffers,
    optimizer, random states and the order of data are bit for bit as without it.

    Args:
        attacks: Names of attacks, attacks, or other callables ``(model, x, y) -> x_adv``; a mapping gives them names.
            Empty for none. Square by name takes 200 queries; pass ``Square(num_queries=5000)`` for more.
        eps: Budget of attacks that are given by name, in un-normalised units; None for their defaults.
        attack_every_n_epochs: How often to attack: in the first validation epoch, whenever so many epochs have passed,
            and at the end of training.
        input_space: What the loader does to inputs: range and normalisation; by default, nothing, to values in [0, 1].
        num_classes: Number of classes, to be checked; by default the number of logits.
        head: The classifier head, by name or as a module; by default it is found.
        forward_fn: Callable that takes the module and inputs and returns logits, where ``module(x)`` does not.
        batch_fn: Callable that takes a batch and returns inputs and labels, for batches of unusual form.
        fim_samples: Number of samples for the Fisher information; 0 for none.
        fim_method: How it is computed; see :func:`~lightning_robustness.functional.fisher_spectral_norm`.
        attack_samples: Number of samples to attack; 0 for none.
        batch_size: Number of samples of these two that are worked on at a time.
        dataloader_idx: Which of several validation loaders to watch.
        seed: Seed of the sample, of random starts and directions: the same in every epoch.
        prefix: What keys start with.
        mode: ``"exact"`` keeps the features of a validation epoch; ``"streaming"`` takes memory of fixed size.
        log_figures: Whether to log pictures and histograms, where a logger takes them.
        log_embeddings: Whether to log the embeddings of the sample to TensorBoard's projector.
        progress: Whether to show progress bars; by default, where the Trainer has one.

    Attributes:
        history: One dictionary for each evaluation, with ``epoch``, ``step`` and the values without prefix.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> from lightning_robustness import RobustnessMonitor
        >>> monitor = RobustnessMonitor(attacks=("pgd", "square"), eps=8 / 255, attack_every_n_epochs=5)
        >>> # Trainer(callbacks=[monitor, EarlyStopping("robustness/rdi", mode="max")])

    """

    def __init__(
        self,
        attacks: Iterable[str | Attack | Callable[..., Any]] | Mapping[str, str | Attack | Callable[..., Any]] = (
            "pgd",
            "cw",
            "square",
        ),
        eps: float | None = 8 / 255,
        attack_every_n_epochs: int = 5,
        input_space: InputSpace | None = None,
        num_classes: int | None = None,
        head: str | nn.Module | None = None,
        forward_fn: Callable[..., Any] | None = None,
        batch_fn: Callable[..., Any] | None = None,
        fim_samples: int = 256,
        fim_method: FisherMethod = "auto",
        attack_samples: int = 512,
        batch_size: int = 128,
        dataloader_idx: int = 0,
        seed: int = 0,
        prefix: str = "robustness",
        mode: Mode = "exact",
        log_figures: bool = True,
        log_embeddings: bool = False,
        progress: bool | None = None,
    ) -> None:
        counts = {"fim_samples": fim_samples, "attack_samples": attack_samples, "dataloader_idx": dataloader_idx}
        for name, value in {**counts, "seed": seed}.items():
            check_integer(name, value, minimum=0)
        for name, value in {"attack_every_n_epochs": attack_every_n_epochs, "batch_size": batch_size}.items():
            check_integer(name, value, minimum=1)
        if not prefix:
            raise ValueError("Expected argument `prefix` to be a name but got an empty one.")
        self.attacks = name_attacks(attacks, eps) if attack_samples else {}
        self.attack_every_n_epochs = attack_every_n_epochs
        self.input_space = input_space or InputSpace()
        self.num_classes = num_classes
        self.head = head
        self.forward_fn = forward_fn
        self.batch_fn = batch_fn
        self.fim_samples = fim_samples
        self.fim_method: FisherMethod = fim_method
        self.attack_samples = attack_samples if self.attacks else 0
        self.batch_size = batch_size
        self.dataloader_idx = dataloader_idx
        self.seed = seed
        self.prefix = prefix
        self.mode: Mode = mode
        self.log_figures = log_figures
        self.log_embeddings = log_embeddings
        self.progress = progress
        self.history: list[dict[str, float]] = []
        # So that wrong arguments are found here
        self._fisher_meter()
        FeatureMeter(2 if num_classes is None else num_classes, mode, torch.device("cpu"))
        self._last_attack_epoch: int | None = None
        self._error: str | None = None
        self._forget()

    @property
    @override
    def state_key(self) -> str:
        return self._generate_state_key(prefix=self.prefix)

    @property
    def keys(self) -> list[str]:
        """Keys of the values that say how robust the network is, as they are logged."""
        attack_free = ["rdi", "rdi_intra", "rdi_inter", "rdi_embedding", "roby", "fsa", "fsd", "acc"]
        fisher = ["fim", "fim_inverse", "fim_geometric", "lipschitz"] if self.fim_samples else []
        kinds, names = ("asr", "adv_acc", "distortion"), [*self.attacks, *(["worst"] if self.attacks else [])]
        attacked = [f"{kind}/{name}" for kind in kinds for name in names]
        return [f"{self.prefix}/{key}" for key in [*attack_free, *fisher, *attacked]]

    def plot(self) -> "Figure":
        """Draw the curves of ``history``.

        Raises:
            ModuleNotFoundError: If matplotlib is not installed; the extra ``plot`` brings it.

        """
        return history_figure(self.history, self.prefix)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"last_attack_epoch": self._last_attack_epoch, "history": self.history}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._resumes:  # `validate` and `test` load checkpoints too, which must not cut the history short
            self._last_attack_epoch = state_dict["last_attack_epoch"]
            self.history = list(state_dict["history"])

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        check_strategy(trainer, self)
        if stage == "fit":
            check_validation(trainer)
            check_order(trainer, self)
        if stage == "fit" and trainer.current_epoch == 0:
            self.history, self._last_attack_epoch = [], None
        self._forget()
        self._resumes = stage == "fit"

    @override
    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()

    @override
    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if dataloader_idx == self.dataloader_idx and self._error is None:
            with self._guard(trainer):
                self._before(trainer, pl_module, batch)

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
        if dataloader_idx == self.dataloader_idx and self._error is None and self._watch is not None:
            with self._guard(trainer):
                if self._watch.after() and self._watch.uses_hooks:
                    self._warn_once(
                        "validation does not run the network on the inputs of its batch as they are, so that another "
                        "forward pass is made for RDI and ROBY. If `validation_step` prepares inputs, by normalising "
                        "them for instance, all values here are of inputs that are not: pass `forward_fn=`, a callable "
                        "that takes the module and inputs, prepares them likewise and returns logits.",
                        key="forward",
                    )

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        with self._guard(trainer):
            if self._watch is None and self._error is None:
                evaluation_loader(trainer, self.dataloader_idx)  # is there such a loader?
                self._error = f"no batch came from loader {self.dataloader_idx}"
        watch, error = self._watch, self._error
        self._close()
        if trainer.sanity_checking:
            return
        self._epoch = trainer.current_epoch
        values = self._survive(trainer, partial(self._evaluate, trainer, pl_module, watch, error)) or {"skipped": 1.0}
        prefix = self._log_prefix(trainer)
        for key, value in values.items():
            is_headline = key in ("rdi", "fim", "adv_acc/worst")
            # All processes have the same values, apart from the time that each took
            pl_module.log(f"{prefix}/{key}", value, prog_bar=is_headline, sync_dist=True, reduce_fx="max", batch_size=1)

    on_test_epoch_start = on_validation_epoch_start
    on_test_batch_start = on_validation_batch_start
    on_test_batch_end = on_validation_batch_end
    on_test_epoch_end = on_validation_epoch_end

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attack once more where training ended between two attacks, as early stopping does."""
        if self._found is None:
            self._warn_once("there was no validation epoch to watch in this run.", key="validation")
        if not self.attacks or self._sample is None or self._attacked_step == trainer.global_step:
            return
        attacks = self._attack_meter()
        self._epoch = max(trainer.current_epoch - 1, 0)  # it is one ahead when training has ended
        values = self._survive(trainer, partial(self._measure_attacks, trainer, pl_module, attacks))
        if values is None:
            return
        self._show(trainer, pl_module, attacks)
        self._remember(trainer, values)
        logged = {f"{self.prefix}/{key}": value for key, value in values.items()}
        for logger in trainer.loggers:
            logger.log_metrics(logged, step=log_step(trainer))
            logger.save()
        trainer.callback_metrics.update({key: torch.tensor(value) for key, value in logged.items()})

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._forget()

    def _forget(self) -> None:
        """Forget the module and its data, and remove hooks."""
        self._close()
        self._resumes = True
        self._found: tuple[str, int] | None = None
        self._sample: _Sample | None = None
        self._sizes = (0, 0)
        self._board: Board | None = None
        self._attacked_step: int | None = None
        self._epoch = 0
        self._warned: set[str] = set()

    def _close(self) -> None:
        """End the watch over a validation epoch."""
        watch = getattr(self, "_watch", None)
        if watch is not None:
            watch.close()
        self._watch: ValidationWatch | None = None
        self._error = None

    @contextmanager
    def _guard(self, trainer: Trainer) -> Iterator[None]:
        """Let no error of the monitor end a training run that has begun; before that, an error is what helps."""
        try:
            yield
        except FloatingPointError as error:
            self._error = str(error)
        except Exception as error:
            if not has_trained(trainer):
                self._forget()
                raise MisconfigurationException(f"RobustnessMonitor: {error}") from error
            self._error = f"{type(error).__name__}: {error}"

    def _survive(self, trainer: Trainer, measure: Callable[[], dict[str, float]]) -> dict[str, float] | None:
        """Measure, without an end to training if that fails; where processes would wait for each other, it ends."""
        try:
            return measure()
        except Exception as error:
            if trainer.world_size > 1 or not has_trained(trainer):
                raise
            self._warn_of_error(f"left epoch {self._epoch} out", f"{type(error).__name__}: {error}")
            return None

    def _before(self, trainer: Trainer, pl_module: LightningModule, batch: Any) -> None:
        x, y = read_batch(batch, self.batch_fn)
        if self._found is None:
            self._found = self._inspect(pl_module, x, y)
        if self._watch is None:
            self._watch = self._open(trainer, pl_module, x.device)
        self._watch.before(x, y)

    def _forward(self, pl_module: LightningModule) -> Callable[..., Any]:
        return forward_of(pl_module, self.forward_fn)

    def _inspect(self, pl_module: LightningModule, x: Tensor, y: Tensor | None) -> tuple[str, int]:
        """Find the head and the number of classes, and try everything on two samples that can be wrong."""
        if self.attacks and y is None:
            raise ValueError(
                "Expected batches with labels, which attacks need, but got none. Pass `batch_fn=`, a callable that "
                "takes a batch and returns inputs and labels, or `attacks=()`."
            )
        if self.fim_samples or self.attacks:
            self.input_space.check(x)
        forward, few = self._forward(pl_module), x[:2]
        try:
            with sandbox(forward, few) as (copies,), torch.no_grad():
                logits = compute_logits(forward, copies)
        except Exception as error:
            raise ValueError(
                f"Expected `{type(pl_module).__name__}(x)` to return logits for inputs of shape {tuple(few.shape)} but "
                f"it failed: {error} Let `forward` do so, or pass `forward_fn=`, a callable that takes the module and "
                "inputs and returns logits."
            ) from error
        if are_probabilities(logits):
            rank_zero_warn(
                f"The outputs of {type(pl_module).__name__} look like probabilities. Attacks and the Fisher "
                "information need logits: return what enters the softmax, or pass a `forward_fn=` that does."
            )
        name = find_head(pl_module, few, forward, self.head)
        call = HeadTap(pl_module, name).run(forward, few)
        num_classes = call.logits.shape[1]
        if self.num_classes not in (None, num_classes):
            raise ValueError(
                f"Expected a head of width {self.num_classes}, as `num_classes` says, but {name!r} has {num_classes}."
            )
        if self.fim_samples:
            try:
                self._fisher_meter().update(forward, few, x.device)
            except Exception as error:
                raise ValueError(
                    f"The Fisher information cannot be computed: {error} Do without, `fim_samples=0`, or pass "
                    '`fim_method="blackbox"`, which needs no gradients.'
                ) from error
        for attack in self.attacks.values():
            if not isinstance(attack, Attack):  # others are known to work, and may take long
                run(forward, attack, few, logits.argmax(dim=1), self.input_space, self.seed)
        width = call.embedding.shape[1]
        rank_zero_info(f"RobustnessMonitor listens to the head {name!r}: {width} features, {num_classes} classes.")
        return name, num_classes

    def _open(self, trainer: Trainer, pl_module: LightningModule, device: torch.device) -> ValidationWatch:
        assert self._found is not None
        name, num_classes = self._found
        loader, num_batches = evaluation_loader(trainer, self.dataloader_idx)
        share = loader_share(loader, num_batches)
        sample = None
        if self._sample is None and not trainer.sanity_checking:
            # Without a distributed sampler, what other processes see is not known: each gives its part of the sample
            parts = trainer.world_size if share.num_replicas == 1 else 1
            self._sizes = math.ceil(self.attack_samples / parts), math.ceil(self.fim_samples / parts)
            sample = SpreadSample(max(self._sizes), share.total, self.seed)
        meter = FeatureMeter(num_classes, self.mode, device)
        return ValidationWatch(pl_module, self._forward(pl_module), name, meter, share, sample)

    def _evaluate(
        self, trainer: Trainer, pl_module: LightningModule, watch: ValidationWatch | None, error: str | None
    ) -> dict[str, float]:
        """Values of a validation epoch; in all processes the same keys."""
        if not trainer.strategy.reduce_boolean_decision(error is None, all=True):
            self._warn_of_error(f"left epoch {self._epoch} out", error)
            return {"skipped": 1.0}
        assert watch is not None
        values = {**watch.meter.compute(), "seconds/features": watch.meter.seconds}
        if watch.sample is not None and not self._try(trainer, "the sample", partial(self._collect, watch.sample)):
            self._sample = None
        fisher, attacks = self._fisher_meter(), self._attack_meter()
        if self.fim_samples and self._sample is not None:
            values |= self._measure_fisher(trainer, pl_module, fisher)
        if self._sample is not None and self._attacks_are_due(trainer):
            values |= self._measure_attacks(trainer, pl_module, attacks)
        start = perf_counter()
        self._show(trainer, pl_module, attacks, watch.meter.distances, fisher.values)
        values |= {"seconds/figures": perf_counter() - start, "skipped": 0.0}
        self._remember(trainer, values)
        return values

    def _collect(self, sample: SpreadSample, progress: bool) -> None:
        x, y = sample.collect()
        self._sample = _Sample(x, y, *(torch.as_tensor(sample.rows(size)) for size in self._sizes))

    def _fisher_meter(self) -> FisherMeter:
        return FisherMeter(self.fim_method, self.input_space, self.seed, self.batch_size)

    def _attack_meter(self) -> AttackMeter:
        return AttackMeter(self.attacks, self.input_space, self.seed, self.batch_size)

    def _measure_fisher(self, trainer: Trainer, pl_module: LightningModule, meter: FisherMeter) -> dict[str, float]:
        assert self._sample is not None
        x = self._sample.x[self._sample.fim_rows]
        update = partial(meter.update, self._forward(pl_module), x, pl_module.device)
        if not self._try(trainer, "the Fisher information", update):
            return {}
        return {**meter.compute(), "seconds/fim": meter.seconds}

    def _measure_attacks(self, trainer: Trainer, pl_module: LightningModule, meter: AttackMeter) -> dict[str, float]:
        assert self._sample is not None
        x, y, rows, _ = self._sample
        assert y is not None
        for name in self.attacks:
            update = partial(meter.update, name, self._forward(pl_module), x[rows], y[rows], pl_module.device)
            if not self._try(trainer, f"the attack {name!r}", update):
                meter.drop(name)
        if trainer.state.fn == "fit":
            self._last_attack_epoch, self._attacked_step = self._epoch, trainer.global_step
        values = meter.compute()
        if meter.signs:
            reasons = " ".join(f"{sign.evidence} {sign.explanation} {sign.remedy}" for sign in meter.signs)
            self._warn_once(f"gradients seem to be masked, so that success rates are too low. {reasons}", key="masking")
        return {**values, **{f"seconds/{name}": seconds for name, seconds in meter.seconds.items()}}

    def _try(self, trainer: Trainer, what: str, update: Callable[..., None]) -> bool:
        """Run a part in this process; say whether it went well in all."""
        error = None
        try:
            update(progress=self._shows_progress(trainer))
        except Exception as exception:
            error = f"{type(exception).__name__}: {exception}"
        if trainer.strategy.reduce_boolean_decision(error is None, all=True):
            return True
        self._warn_of_error(f"{what} failed and is left out of epoch {self._epoch}", error)
        return False

    def _attacks_are_due(self, trainer: Trainer) -> bool:
        if not self.attacks:
            return False
        if trainer.state.fn != "fit" or self._last_attack_epoch is None:
            return True
        if trainer.current_epoch - self._last_attack_epoch >= self.attack_every_n_epochs:
            return True
        is_last_epoch = trainer.max_epochs == trainer.current_epoch + 1
        is_last_step = trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps
        return is_last_step or (is_last_epoch and trainer.fit_loop.epoch_loop.batch_progress.is_last_batch)

    def _remember(self, trainer: Trainer, values: dict[str, float]) -> None:
        if trainer.state.fn == "fit":
            self.history.append({"epoch": self._epoch, "step": log_step(trainer), **values})

    def _show(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        attacks: AttackMeter,
        distances: Mapping[str, Tensor] = MappingProxyType({}),
        lambdas: Tensor | None = None,
    ) -> None:
        """Hand everything that is not a scalar to the loggers; a picture is never worth a training run."""
        if not trainer.is_global_zero or not trainer.loggers:
            return
        try:
            if self._board is None:
                self._board = Board(trainer.loggers, self._log_prefix(trainer), self.log_figures)
                self._board.open(self._settings(pl_module), list(self.attacks), log_step(trainer))
            self._board.show(
                log_step(trainer),
                distances=distances,
                lambdas=lambdas,
                examples=attacks.examples,
                signs=attacks.signs,
                input_space=self.input_space,
            )
            if self.log_embeddings and self._sample is not None:
                self._embed(trainer, pl_module, self._board)
        except Exception as error:
            self._warn_once(f"pictures could not be logged: {type(error).__name__}: {error}", key="pictures")

    def _embed(self, trainer: Trainer, pl_module: LightningModule, board: Board) -> None:
        assert self._found is not None
        assert self._sample is not None
        tap, forward = HeadTap(pl_module, self._found[0]), self._forward(pl_module)
        x, y = self._sample.x, self._sample.y
        calls = [tap.run(forward, rows.to(pl_module.device)) for rows in x.split(self.batch_size)]
        embedding, preds = torch.cat([c.embedding for c in calls]), torch.cat([c.logits for c in calls]).argmax(dim=1)
        board.embed(
            log_step(trainer), embedding.cpu(), preds.cpu() if y is None else y, preds.cpu(), x, self.input_space
        )

    def _settings(self, pl_module: LightningModule) -> dict[str, str]:
        assert self._found is not None
        budgets = [budget_of(attack, self.input_space) for attack in self.attacks.values()]
        return {
            "attacks": "; ".join(f"{name}: {attack!r}" for name, attack in self.attacks.items()) or "none",
            "eps": ", ".join(dict.fromkeys(describe_eps(budget.eps) for budget in budgets if budget)),
            "attacked": f"{self.attack_samples} samples, every {self.attack_every_n_epochs} epochs",
            "Fisher information": f"{self.fim_samples} samples, method {self.fim_method!r}",
            "input space": repr(self.input_space),
            "head": f"{self._found[0]!r} of {type(pl_module).__name__}, {self._found[1]} classes",
            "RDI and ROBY": f"all samples, mode {self.mode!r}",
            "seed": str(self.seed),
        }

    def _log_prefix(self, trainer: Trainer) -> str:
        return f"test_{self.prefix}" if trainer.testing else self.prefix

    def _shows_progress(self, trainer: Trainer) -> bool:
        wanted = trainer.progress_bar_callback is not None if self.progress is None else self.progress
        return wanted and trainer.is_global_zero

    def _warn_once(self, message: str, key: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            rank_zero_warn(f"RobustnessMonitor: {message}")

    def _warn_of_error(self, message: str, error: str | None) -> None:
        """Warn once of each error, in the process that met it, whichever that is."""
        if error is not None and error not in self._warned:
            self._warned.add(error)
            warnings.warn(f"RobustnessMonitor: {message}: {error}", stacklevel=2)
