import html
import io
import json
import re
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from google.protobuf import text_format
from hypothesis import example, given
from hypothesis import strategies as st
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import DummyLogger
from PIL import Image
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugin_util import markdown_to_safe_html
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.custom_scalar.custom_scalars_plugin import CustomScalarsPlugin
from tensorboard.plugins.projector.projector_config_pb2 import ProjectorConfig
from tensorboard.plugins.scalar.scalars_plugin import ScalarsPlugin
from torch.utils.tensorboard import SummaryWriter

from lightning_robustness.attacks import MaskingSign
from lightning_robustness.callbacks import board as board_module
from lightning_robustness.callbacks.board import Board, describe_eps, markdown_list
from lightning_robustness.callbacks.figures import boundary_figure, perturbation_figure, render
from lightning_robustness.measurement.attack_meter import Examples
from lightning_robustness.measurement.boundary_curve import BoundaryCurve
from lightning_robustness.utilities.input_space import InputSpace

SPACE = InputSpace(mean=0.5, std=0.25)
NOTHING = {"histograms": {}, "examples": {}, "signs": [], "input_space": SPACE}
SIGN = MaskingSign("zero_gradients", "PGD finds none.", "It cannot move.", "Use `Square`.")

KEYS = (
    *("acc", "adv_acc/pgd", "adv_acc/worst", "asr/pgd", "asr/worst", "rdi", "rdi_intra", "rdi_embedding", "roby"),
    *("fsa", "fsd", "fim", "fim_inverse", "fim_geometric", "clever", "lipschitz", "distortion/pgd"),
    *("boundary", "boundary_acc"),
    *("seconds/features", "seconds/fim", "seconds/pgd", "seconds/figures", "samples", "samples_fim", "masking"),
    *("accidental", "asr", "asr_low/pgd"),
)
CHARTS = {
    "Clean and adversarial accuracy": ["acc", "adv_acc/pgd", "adv_acc/worst", "boundary_acc"],
    "Attack success": ["asr/pgd", "asr/worst"],
    "RDI": ["rdi", "rdi_embedding"],
    "ROBY, FSA, FSD": ["fsa", "fsd", "roby"],
    "Fisher information": ["fim", "fim_geometric"],
    "Distance to the boundary": ["boundary"],
    "What watching costs (seconds)": [f"seconds/{part}" for part in ("features", "figures", "fim", "pgd")],
}


@pytest.fixture
def logger(tmp_path):
    return TensorBoardLogger(tmp_path, name="run")


@pytest.fixture
def examples(digits):
    x, y = digits[0][:2], digits[1][:2]
    return Examples(SPACE.normalize(x), SPACE.normalize((x + 0.1).clamp(0, 1)), y, y, y + 1)


def read(logger):
    """Everything in the event files of a run."""
    logger.experiment.flush()
    return EventAccumulator(
        logger.log_dir, size_guidance=dict.fromkeys(("scalars", "tensors", "images", "histograms"), 0)
    ).Reload()


def texts(logger, tag):
    return [(event.step, event.tensor_proto.string_val[0].decode()) for event in read(logger).Tensors(tag)]


def all_tags(logger):
    return {tag for tags in read(logger).Tags().values() if isinstance(tags, list) for tag in tags}


def charts(logger):
    """What TensorBoard shows: for each category and chart the tags that it finds."""
    logger.experiment.flush()
    multiplexer = EventMultiplexer().AddRun(logger.log_dir, "run").Reload()
    plugins = {}
    context = TBContext(
        data_provider=MultiplexerDataProvider(multiplexer, logger.log_dir), plugin_name_to_instance=plugins
    )
    plugins["scalars"], plugin = ScalarsPlugin(context), CustomScalarsPlugin(context)
    layout = plugin.layout_impl(RequestContext(), "")
    return {
        category["title"]: {chart["title"]: matches(plugin, chart["multiline"]["tag"]) for chart in category["chart"]}
        for category in json.loads(layout)["category"]
    }


def matches(plugin, tags):
    expression = "|".join(f"({tag})" for tag in tags)  # as its page asks for several
    return sorted(plugin.scalars_impl(RequestContext(), "run", expression, "")["tag_to_events"])


def charts_of(prefix):
    return {title: [f"{prefix}/{key}" for key in keys] for title, keys in CHARTS.items()}


def test_charts_find_their_values(logger):
    logger.log_metrics({f"{p}/{key}": 1.0 for p in ("robustness", "robustness2") for key in KEYS}, step=1)
    Board([logger], "robustness").open({}, ["pgd"], step=0)
    assert charts(logger) == {"robustness": charts_of("robustness")}
    assert list(charts(logger)["robustness"]) == list(CHARTS)


def test_all_boards_of_a_run_get_their_charts(logger):
    prefixes = ["robustness", "second+monitor.", "test_robustness"]
    logger.log_metrics({f"{prefix}/{key}": 1.0 for prefix in prefixes for key in KEYS}, step=1)
    for prefix in prefixes[:2]:
        Board([logger], prefix).open({}, ["pgd"], step=0)
    logger.finalize("success")  # as `fit` does, before `test`
    Board([logger], prefixes[2]).open({}, ["pgd"], step=9)
    assert charts(logger) == {prefix: charts_of(prefix) for prefix in prefixes}


def test_runs_do_not_mix(logger, tmp_path):
    other = TensorBoardLogger(tmp_path, name="other")
    Board([logger], "first").open({}, [], step=0)
    Board([logger, other], "second").open({}, [], step=0)
    assert [*charts(logger)] == ["first", "second"]
    assert [*charts(other)] == ["second"]


def test_prefix_of_the_logger(tmp_path):
    logger = TensorBoardLogger(tmp_path, prefix="fold1")
    logger.log_metrics({f"robustness/{key}": 1.0 for key in KEYS}, step=1)
    Board([logger], "robustness").open({}, ["pgd"], step=0)
    assert charts(logger) == {"fold1-robustness": charts_of("fold1-robustness")}


def test_without_attacks(logger):
    logger.log_metrics({f"robustness/{key}": 1.0 for key in ("acc", "rdi")}, step=1)
    Board([logger], "robustness").open({}, [], step=0)
    shown = charts(logger)["robustness"]
    assert shown["Clean and adversarial accuracy"] == ["robustness/acc"]
    assert "Attack success" not in shown


def test_charts_of_parts(logger):
    logger.log_metrics({f"robustness/{key}": 1.0 for key in KEYS}, step=1)
    Board([logger], "robustness").open({}, [], step=0, parts=["clever"])
    shown = charts(logger)["robustness"]
    assert shown.pop("CLEVER") == ["robustness/clever"]
    assert list(shown) == ["What watching costs (seconds)"]


def test_settings(logger):
    Board([logger], "robustness").open({"attacks": "pgd: PGD(eps=0.1)", "seed": "0"}, ["pgd"], step=3)
    expected = "- **attacks**: pgd: PGD(eps=0.1)\n- **seed**: 0"
    assert texts(logger, "robustness/settings/text_summary") == [(3, expected)]


def test_masking_signs(logger):
    board = Board([logger], "robustness")
    board.show(1, **NOTHING)
    board.show(2, **NOTHING | {"signs": [SIGN, SIGN._replace(name="other")]})
    line = "PGD finds none. It cannot move. Use `Square`."
    expected = f"- **zero_gradients**: {line}\n- **other**: {line}"
    assert texts(logger, "robustness/masking_signs/text_summary") == [(2, expected)]


@given(st.text(alphabet="ab<>&|=' \n()-"))
@example("<a> &lt;")
@example("\n- b")
def test_texts_are_shown_as_they_are(text):
    page = markdown_to_safe_html(markdown_list([("name", f"x{text}x")]))
    shown = html.unescape(re.sub("<[^<>]+>", lambda tag: "\n" if "br" in tag[0] else "", page))
    assert shown.split() == f"name: x{text}x".split()
    assert page.count("<li>") == 1


def test_histograms_of_distances(logger):
    values = torch.tensor([1.0, torch.nan, 4.0, torch.inf, 2.5, 1e25])
    Board([logger], "robustness").show(
        7, **NOTHING | {"histograms": {"distances/rdi": values, "distances/roby": values[:1]}}
    )
    (event,) = read(logger).Histograms("robustness/distances/rdi")
    histogram = event.histogram_value
    assert event.step == 7
    assert (histogram.num, histogram.min, histogram.max, histogram.sum) == (3, 1.0, 4.0, 7.5)
    assert read(logger).Histograms("robustness/distances/roby")[0].histogram_value.num == 1


def test_other_precisions(logger):
    for step, dtype in enumerate([torch.float16, torch.bfloat16, torch.float64]):
        values = torch.tensor([1.0, 2.0], dtype=dtype)
        Board([logger], "r").show(step, **NOTHING | {"histograms": {"distances/rdi": values}})
    events = read(logger)
    assert [event.histogram_value.sum for event in events.Histograms("r/distances/rdi")] == [3.0] * 3


def test_nothing_to_show(logger):
    nothing = torch.full((3,), torch.nan)
    Board([logger], "r").show(0, **NOTHING | {"histograms": {"distances/rdi": nothing, "lambda_log10": torch.zeros(0)}})
    assert all_tags(logger) == set()


def picture(examples, name, step):
    return render(perturbation_figure(examples, SPACE, f"{name}, step {step}"))


def test_examples_of_each_attack(logger, examples):
    board = Board([logger], "robustness")
    board.show(3, **NOTHING | {"examples": {"pgd": examples, "cw": Examples(*(part[:0] for part in examples))}})
    board.show(6, **NOTHING | {"examples": {"pgd": examples}})
    events = read(logger)
    assert events.Tags()["images"] == ["robustness/examples/pgd"]
    images = events.Images("robustness/examples/pgd")
    assert [image.step for image in images] == [3, 6]
    shown = np.asarray(Image.open(io.BytesIO(images[1].encoded_image_string)))
    np.testing.assert_array_equal(shown, picture(examples, "pgd", 6))


def test_curves_of_all_epochs(logger):
    board, curves = Board([logger], "robustness"), {epoch: curve_of(epoch) for epoch in (0, 2, 3)}
    for epoch, curve in curves.items():
        board.show(10 * epoch, **NOTHING, epoch=epoch, curve=curve)
    images = read(logger).Images("robustness/boundary_curve")
    assert [image.step for image in images] == [0, 20, 30]
    shown = np.asarray(Image.open(io.BytesIO(images[-1].encoded_image_string)))
    np.testing.assert_array_equal(shown, render(boundary_figure(curves)))


def curve_of(epoch):
    return BoundaryCurve.of(torch.linspace(-0.1, 0.2 + 0.1 * epoch, 50), "linf", 0.1)


def test_turned_off(logger, examples):
    full = {"histograms": {"lambda_log10": torch.ones(3)}, "examples": {"pgd": examples}}
    Board([logger], "robustness", figures=False).show(0, **NOTHING | full | {"signs": [SIGN], "curve": curve_of(0)})
    assert all_tags(logger) == {"robustness/masking_signs/text_summary"}


def test_without_matplotlib_there_is_one_warning_and_everything_else(logger, examples, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    board = Board([logger], "r")
    full = NOTHING | {"examples": {"pgd": examples, "cw": examples}, "histograms": {"lambda_log10": torch.ones(3)}}
    with pytest.warns(UserWarning, match=r'Figures are left out.*pip install "lightning-robustness\[plot\]"') as record:
        board.show(0, **full)
    assert len(record) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        board.show(1, **full)
    assert all_tags(logger) == {"r/lambda_log10"}
    assert len(read(logger).Histograms("r/lambda_log10")) == 2


def embed(logger, x, embedding=None, space=SPACE, **kwargs):
    y = torch.arange(len(x)) % 10
    embedding = torch.randn(len(x), 4) if embedding is None else embedding
    Board([logger], "robustness", **kwargs).embed(5, embedding, y, y + 1, space.normalize(x), space)
    return f"{logger.log_dir}/00005/robustness%2fembedding"


def config(logger):
    text = Path(logger.log_dir, "projector_config.pbtxt").read_text()
    return text_format.Parse(text, ProjectorConfig()).embeddings


def cut_tiles(folder, side, number):
    """Thumbnails, cut out of the picture that holds all of them."""
    sprite = np.asarray(Image.open(f"{folder}/sprite.png")) / 255
    across = int(np.ceil(np.sqrt(number)))
    assert sprite.shape == (across * side, across * side, 3)
    corners = [(side * (index // across), side * (index % across)) for index in range(number)]
    return np.stack([sprite[top : top + side, left : left + side] for top, left in corners])


def test_projector_reads_labels_and_thumbnails(logger, digits):
    x, embedding = digits[0][:5], torch.randn(5, 2, 3)
    folder = embed(logger, x, embedding)
    np.testing.assert_allclose(np.loadtxt(f"{folder}/tensors.tsv"), embedding.flatten(1), rtol=1e-6)
    rows = [line.split("\t") for line in Path(folder, "metadata.tsv").read_text().splitlines()]
    assert rows == [["label", "prediction"], *([str(label), str(label + 1)] for label in range(5))]
    expected = np.repeat(x.permute(0, 2, 3, 1).numpy(), 3, axis=3)
    np.testing.assert_allclose(cut_tiles(folder, 8, 5), expected, atol=1 / 255)
    (info,) = config(logger)
    assert info.tensor_name == "robustness/embedding:00005"
    assert info.sprite.single_image_dim == [8, 8]
    for path in (info.tensor_path, info.metadata_path, info.sprite.image_path):
        assert path.startswith("00005/robustness%2fembedding/")


@pytest.mark.parametrize(("height", "width"), [(12, 7), (7, 12)])
def test_images_that_are_no_squares(logger, height, width):
    x = torch.rand(6, 3, height, width)
    tiles = cut_tiles(embed(logger, x), 12, 6)
    top, left = (12 - height) // 2, (12 - width) // 2
    inside = tiles[:, top : top + height, left : left + width]
    np.testing.assert_allclose(inside, x.permute(0, 2, 3, 1), atol=1 / 255)
    assert tiles.sum() == pytest.approx(inside.sum())


def test_large_images_are_made_smaller(logger, monkeypatch):
    x = torch.rand(3, 1, 128, 128)
    tiles = cut_tiles(embed(logger, x), 64, 3)
    means = x.reshape(3, 64, 2, 64, 2).mean(dim=(2, 4))
    np.testing.assert_allclose(tiles[..., 0], means, atol=1 / 255)
    monkeypatch.setattr(board_module, "MAX_SPRITE", 32)
    assert cut_tiles(embed(logger, x), 16, 3)[..., 0].mean() == pytest.approx(x.mean().item(), abs=1 / 255)


def test_without_thumbnails(logger, digits):
    embed(logger, torch.randn(4, 9), space=InputSpace(None, None))
    embed(logger, digits[0][:4], figures=False)
    assert [info.HasField("sprite") for info in config(logger)] == [False, False]


def test_nothing_to_embed(logger):
    embed(logger, torch.zeros(0, 1, 8, 8))
    assert not Path(logger.log_dir, "projector_config.pbtxt").exists()


def show_all(loggers, examples):
    board = Board(loggers, "robustness")
    board.open({"seed": "0"}, ["pgd"], step=0)
    full = {"histograms": {"lambda_log10": torch.ones(3)}, "examples": {"pgd": examples}}
    board.show(4, **NOTHING | full | {"signs": [SIGN]})
    board.embed(4, torch.ones(2, 3), examples.y, examples.preds, examples.x, SPACE)


def test_weights_and_biases(examples, monkeypatch):
    logged = []

    class Recorder(WandbLogger):
        def __init__(self):
            pass

        def log_metrics(self, metrics, step=None):
            logged.append((step, metrics))

    wandb = SimpleNamespace(Image=lambda image: image, Table=lambda **table: table)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    show_all([Recorder()], examples)
    settings, signs, (step, pictures) = logged
    table = {"columns": ["setting", "value"], "data": [["seed", "0"]], "dataframe": None}
    assert settings == (0, {"robustness/settings": table})
    table = {"columns": ["name", "evidence", "explanation", "remedy"], "data": [list(SIGN)], "dataframe": None}
    assert signs == (4, {"robustness/masking_signs": table})
    assert step == 4
    expected = render(perturbation_figure(examples, SPACE, "pgd, step 4"))
    np.testing.assert_array_equal(pictures["robustness/examples/pgd"], [expected])


def test_others_get_nothing(examples, monkeypatch, tmp_path):
    class Other(CSVLogger):
        def log_image(self, name, path):
            raise AssertionError("this is not how pictures are logged")

    def draw(*args):
        raise AssertionError("nobody asks for a picture")

    monkeypatch.setattr(board_module, "perturbation_figure", draw)
    logger = Other(tmp_path)
    show_all([logger, DummyLogger()], examples)
    assert logger.experiment.metrics == []


def test_all_loggers_of_a_trainer(logger, examples, tmp_path):
    second = TensorBoardLogger(tmp_path, name="second")
    show_all([CSVLogger(tmp_path), logger, second], examples)
    assert all_tags(logger) == all_tags(second)
    assert "robustness/examples/pgd" in all_tags(second)


def test_tensorboard_by_its_name(tmp_path):
    """The logger of ``pytorch_lightning`` is not a subclass of that of ``lightning``."""
    foreign = type("TensorBoardLogger", (), {"experiment": SummaryWriter(tmp_path), "log_dir": str(tmp_path)})
    logger = type("Mine", (foreign,), {})()
    Board([logger], "robustness").show(2, **NOTHING | {"histograms": {"lambda_log10": torch.ones(3)}})
    assert read(logger).Histograms("robustness/lambda_log10")[0].step == 2
    logger.experiment.close()


def test_processes_without_a_writer(logger, examples, monkeypatch):
    monkeypatch.setattr("lightning.fabric.loggers.logger.rank_zero_only.rank", 1)
    show_all([logger], examples)
    monkeypatch.setattr("lightning.fabric.loggers.logger.rank_zero_only.rank", 0)
    assert all_tags(logger) == set()


@pytest.mark.parametrize(
    ("eps", "expected"),
    [
        (8 / 255, "0.0314 (8/255)"),
        (0.25 / 255, "0.00098 (0.25/255)"),
        (0.3, "0.3 (76.5/255)"),
        (0.12, "0.12"),
        (0.0314, "0.0314"),
        (1e-9, "1e-09"),
        (0.0, "0"),
        (1.0, "1"),
        (8, "8"),
        (None, "None"),
    ],
)
def test_budgets(eps, expected):
    assert describe_eps(eps) == expected


@given(st.integers(1, 254))
def test_all_steps_of_pixels(number):
    shown = re.fullmatch(r"([\d.]+) \((\d+)/255\)", describe_eps(number / 255))
    assert int(shown[2]) == number
    assert float(shown[1]) == pytest.approx(number / 255, rel=5e-3)
