import lightning as L
import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.hparams import backend_context, list_session_groups
from tensorboard.plugins.hparams.api_pb2 import ListSessionGroupsRequest

from lightning_robustness import RobustnessMonitor
from tests.callbacks.modules import Classifier, make_trainer, train_loader, val_loader

COLUMNS = ["acc", "adv_acc/worst", "boundary_acc", "rdi", "roby", "fim"]


class Tuned(Classifier):
    def __init__(self, rate: float = 0.5, kind: str = "small") -> None:
        super().__init__()
        self.save_hyperparameters()


class Owner(Tuned):
    """A module that logs its own table, as Lightning's docs have it."""

    def on_train_start(self):
        self.logger.log_hyperparams(self.hparams, {"mine": 0.75})


class Data(L.LightningDataModule):
    def __init__(self, size: int = 7) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self):
        return train_loader()

    def val_dataloader(self):
        return val_loader()


def fit(path, module, data=None, **options):
    logger = TensorBoardLogger(path, **options)
    monitor = RobustnessMonitor(attacks=("fgsm",), eps=0.1, fim_samples=8, attack_samples=16, log_figures=False)
    trainer = make_trainer(path, monitor, max_epochs=2, logger=logger)
    trainer.fit(module, Data() if data is None else data)
    return monitor, logger


def table(logger):
    """The row of the run in the tab: hyperparameters, and the values of the columns in their order."""
    multiplexer = EventMultiplexer().AddRun(logger.log_dir, "run").Reload()
    provider = MultiplexerDataProvider(multiplexer, logger.log_dir)
    context = backend_context.Context(TBContext(data_provider=provider))
    metadata = context.hparams_metadata(RequestContext(), "")
    experiment = context.experiment_from_metadata(RequestContext(), "", True, metadata, [])
    columns = [info.name.tag for info in experiment.metric_infos]
    request = ListSessionGroupsRequest(start_index=0, slice_size=9)
    request.allowed_statuses.extend([0, 1, 2, 3])
    response = list_session_groups.Handler(RequestContext(), context, "", request).run()
    (group,) = response.session_groups
    values = {value.name.tag: value.value for value in group.metric_values}
    params = {name: value.number_value or value.string_value for name, value in group.hparams.items()}
    return params, {column: values.get(column) for column in columns}


@pytest.mark.parametrize(
    ("options", "prefix", "first"),
    [({}, "", ["hp_metric"]), ({"default_hp_metric": False}, "", []), ({"prefix": "fold1"}, "fold1-", ["hp_metric"])],
)
def test_hyperparameters_of_the_module_have_the_final_values_beside_them(tmp_path, options, prefix, first):
    monitor, logger = fit(tmp_path, Tuned(), **options)
    params, values = table(logger)
    expected = {f"{prefix}{name}": -1 for name in first}
    expected |= {f"{prefix}robustness/{name}": monitor.history[-1][name] for name in COLUMNS}
    assert params == {"rate": 0.5, "kind": "small", "size": 7}
    assert values == pytest.approx(expected)
    assert list(values) == list(expected)


def test_a_run_without_hyperparameters(tmp_path):
    class Plain(Data):
        def __init__(self):
            L.LightningDataModule.__init__(self)

    monitor, logger = fit(tmp_path, Classifier(), Plain())
    params, values = table(logger)
    assert params == {"eps": 0.1, "attacks": "fgsm"}
    assert values == pytest.approx({f"robustness/{name}": monitor.history[-1][name] for name in COLUMNS})


def test_a_table_of_the_user_stays(tmp_path):
    _, logger = fit(tmp_path, Owner(), default_hp_metric=False)
    assert table(logger) == ({"rate": 0.5, "kind": "small"}, {"mine": 0.75})
