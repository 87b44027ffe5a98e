import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_robustness._lightning.training_step import TrainingStepCallback, find_loss
from lightning_robustness._model.access import Access
from tests.callbacks.modules import Classifier, make_trainer, train_loader


class Scale(TrainingStepCallback):
    """Scales inputs, and writes down what it sees."""

    def __init__(self, factor, notes):
        super().__init__(Access())
        self.factor, self.notes = factor, notes

    def around_training_step(self, trainer, pl_module, step, batch, *args):
        self.notes.append(("before", self.factor, batch[0].max().item()))
        output = step([batch[0] * self.factor, batch[1]], *args)
        self.notes.append(("after", self.factor))
        return output


class Module(Classifier):
    def __init__(self, notes):
        super().__init__()
        self.notes = notes

    def training_step(self, batch):
        self.notes.append(("step", batch[0].max().item()))
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


def test_the_first_callback_is_outermost_and_nothing_is_left(tmp_path):
    notes = []
    trainer = make_trainer(tmp_path, Scale(0.5, notes), Scale(0.1, notes), limit_train_batches=1)
    module = Module(notes)
    for _ in range(2):
        notes.clear()
        trainer.fit_loop.max_epochs = trainer.current_epoch + 1
        trainer.fit(module, train_loader())
        expected = [("before", 0.5, 1.0), ("before", 0.1, 0.5), ("step", 0.05), ("after", 0.1), ("after", 0.5)]
        assert [entry[:-1] for entry in notes] == [entry[:-1] for entry in expected]
        assert [entry[-1] for entry in notes] == pytest.approx([entry[-1] for entry in expected])
        assert "training_step" not in vars(trainer.strategy)
        assert not {"training_step", "forward"} & vars(module).keys()


def test_nothing_is_left_after_an_exception(tmp_path):
    class Broken(Classifier):
        def training_step(self, batch, batch_idx):
            raise ZeroDivisionError

    trainer = make_trainer(tmp_path, Scale(0.5, []), Scale(0.1, []))
    with pytest.raises(ZeroDivisionError):
        trainer.fit(Broken(), train_loader())
    assert "training_step" not in vars(trainer.strategy)


def test_iterators_are_refused(tmp_path):
    class Fetching(Classifier):
        def training_step(self, dataloader_iter):
            pass

    with pytest.raises(MisconfigurationException, match=r"takes `dataloader_iter`, .* Scale"):
        make_trainer(tmp_path, Scale(0.5, [])).fit(Fetching(), train_loader())


def test_sharded_parameters_are_refused():
    class Trainer:
        strategy = FSDPStrategy.__new__(FSDPStrategy)

    with pytest.raises(MisconfigurationException, match=r"Scale .*FSDPStrategy shards"):
        Scale(0.5, []).setup(Trainer(), Classifier(), "fit")


def test_nothing_is_checked_outside_of_training(tmp_path):
    class Fetching(Classifier):
        def training_step(self, dataloader_iter):
            pass

    make_trainer(tmp_path, Scale(0.5, [])).validate(Fetching(), train_loader(), verbose=False)


def test_loss_of_what_a_step_returns():
    loss = torch.tensor(1.0)
    assert find_loss(loss) is loss
    assert find_loss({"loss": loss, "logits": None}) is loss
    assert find_loss(None) is None
    assert find_loss({}) is None
