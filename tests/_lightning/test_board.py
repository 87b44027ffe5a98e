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
from tensorboard.summary.writer import event_file_writer

from lightning_robustness import RobustnessMonitor
from lightning_robustness._display.drawing import render
from lightning_robustness._display.report_figures import boundary_figure
from lightning_robustness._display.run_figures import class_figure, history_figure, perturbation_figure
from lightning_robustness._lightning import board as board_module
from lightning_robustness._lightning.board import Board
from lightning_robustness._lightning.faults import Faults
from lightning_robustness._lightning.sinks import _HINT, markdown_list
from lightning_robustness._measurement import keys
from lightning_robustness._measurement.assisted import BoundaryCurve, assist
from lightning_robustness._measurement.findings import Findings
from lightning_robustness._measurement.keys import logged_keys, tag
from lightning_robustness._measurement.meters.attack import Examples
from lightning_robustness._measurement.rows import Rows
from lightning_robustness._measurement.samples import Samples
from lightning_robustness._model.head import HeadCall
from lightning_robustness.attacks import PGD, MaskingSign, MinimumNormCW
from lightning_robustness.input_space import InputSpace

SPACE = InputSpace(mean=0.5, std=0.25)
SIGN = MaskingSign("zero_gradients", "PGD finds none.", "It cannot move.", "Use `Square`.")

ATTACKS = {"pgd": PGD(eps=8 / 255, steps=8), "cw": MinimumNormCW(initial_steps=16, steps=2)}
PARTS = ["features", "fim", "trust"]
# Of these, test_keys.py has the titles and names
CHARTS = keys.charts(PARTS, list(ATTACKS), ["cw"])


@pytest.fixture
def logger(tmp_path, monkeypatch):
    # Event files of the same second are sorted by this number as text, which puts 10 before 9
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    return TensorBoardLogger(tmp_path, name="run")


@pytest.fixture
def examples(digits):
    x, y = digits[0][:2], digits[1][:2]
    return Examples(SPACE.normalize(x), SPACE.normalize((x + 0.1).clamp(0, 1)), y, y, y + 1)


def read(logger):
    """Everything in the event files of a run."""
    logger.experiment.flush()
    everything = dict.fromkeys(("scalars", "tensors", "images", "histograms"), 0)
    return EventAccumulator(logger.log_dir, size_guidance=everything).Reload()


def texts(logger, tag):
    return [(event.step, event.tensor_proto.string_val[0].decode()) for event in read(logger).Tensors(tag)]


def all_tags(logger):
    """All tags but those of what every board begins with."""
    tags = {tag for tags in read(logger).Tags().values() if isinstance(tags, list) for tag in tags}
    begins = ("custom_scalars__config__", "/glossary/text_summary", "/settings/text_summary")
    return {tag for tag in tags if not tag.endswith(begins)}


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
        category["title"].removesuffix(_HINT): {chart["title"]: found(plugin, chart) for chart in category["chart"]}
        for category in json.loads(layout)["category"]
    }


def found(plugin, chart):
    """Tags as its page asks for them: as regular expressions."""
    expression = "|".join(f"({tag})" for tag in chart["multiline"]["tag"])
    return sorted(plugin.scalars_impl(RequestContext(), "run", expression, "")["tag_to_events"])


def charts_of(prefix, shown=CHARTS):
    groups = dict.fromkeys(chart.group for chart in shown)
    return {
        f"{prefix}: {group}": {
            chart.title: sorted(tag(prefix, name) for name in chart.names) for chart in shown if chart.group == group
        }
        for group in groups
    }


def log_charts(logger, *prefixes):
    logger.log_metrics({tag(prefix, name): 1.0 for prefix in prefixes for key in CHARTS for name in key.names}, step=1)


class Shown(Board):
    """A board of a Trainer of which the loggers and the step matter alone."""

    def __init__(self, loggers, prefix="robustness", attacks=ATTACKS, **options):
        loop = SimpleNamespace(_batches_that_stepped=0)
        trainer = SimpleNamespace(loggers=loggers, is_global_zero=True, fit_loop=SimpleNamespace(epoch_loop=loop))
        settings = RobustnessMonitor(attacks, input_space=SPACE, **options).settings
        super().__init__(settings, trainer, prefix, Faults(trainer))
        self.loop = loop

    def show(self, step, epoch=0, examples=None, sample=None, subject=None, **found):
        """Show findings at a step."""
        self.loop._batches_that_stepped = step
        parts = dict.fromkeys(("features", "worst", "curve")) | {"signs": [], "values": {"l2_budget": 0.2}}
        parts |= {name: {} for name in ("rows", "attacks", "rates", "histograms", "estimates")}
        route = SimpleNamespace(head="fc", num_classes=10)
        subject = subject or SimpleNamespace(route=route, input_space=SPACE, model=torch.nn.Identity())
        super().show(Findings(**parts | found), examples or {}, epoch, subject, sample)

    def show_history(self, history, values=None, kept=None, step=0):
        self.loop._batches_that_stepped = step or self.loop._batches_that_stepped
        return super().show_history(history, values or {}, kept)

    def show_summary(self, lines, step):
        self.loop._batches_that_stepped = step
        super().show_summary(lines, [], None)


def test_all_boards_of_a_run_get_their_charts(logger):
    prefixes = ["robustness", "second+monitor.", "test_robustness"]
    log_charts(logger, *prefixes)
    for prefix in prefixes[:2]:
        Shown([logger], prefix).show(0)
    logger.finalize("success")  # as `fit` does, before `test`
    Shown([logger], prefixes[2]).show(9)
    assert charts(logger) == charts_of(prefixes[0]) | charts_of(prefixes[1]) | charts_of(prefixes[2])
    assert [*charts(logger)] == [group for prefix in prefixes for group in charts_of(prefix)]


def test_prefix_of_the_logger(tmp_path, examples):
    logger = TensorBoardLogger(tmp_path, prefix="fold1")
    log_charts(logger, "robustness")
    Shown([logger]).show(0)
    assert charts(logger) == charts_of("fold1-robustness")
    Shown([logger]).show(3, examples={"pgd": examples})
    assert read(logger).Tags()["images"] == ["fold1-robustness/examples/pgd"]


def test_charts_of_parts_without_attacks(logger):
    shown = keys.charts(["features", "clever"], [])
    logger.log_metrics({f"robustness/{name}": 1.0 for chart in shown for name in chart.names}, step=1)
    Shown([logger], attacks=(), fim_samples=0, clever_samples=4).show(0)
    assert charts(logger) == charts_of("robustness", shown)


def shown_lines(logger, tag):
    """The step and the lines of the only text, as a board renders its Markdown."""
    ((step, text),) = texts(logger, f"robustness/{tag}/text_summary")
    return step, rendered(text)


def rendered(text):
    page = re.sub("<[^<>]+>", "", markdown_to_safe_html(text))
    return [html.unescape(line) for line in page.splitlines() if line]


def test_glossary(logger):
    Shown([logger], fim_samples=0, clever_samples=4).show(3)
    step, lines = shown_lines(logger, "glossary")
    assert step == 3
    assert lines[0] == "attack pgd: 8 steps, perturbations of at most 8/255 in linf"
    assert lines[1] == "attack cw: C&W from a DDN start, 16 + 2 steps, l2 <= 0.2"
    (clever,) = [line for line in lines if line.startswith("robustness/clever: mean CLEVER score: ")]
    assert clever.endswith(" (higher is more robust)")
    names = {line.split(":")[0] for line in lines}
    assert {f"robustness/{kind}/<attack>" for kind in ("adv_acc", "asr", "distortion")} < names
    assert "robustness/masking" in names
    assert "robustness/fim" not in names


def test_glossary_has_every_key_that_is_logged(logger):
    Shown([logger]).show(0)
    _, lines = shown_lines(logger, "glossary")
    assert any("Kendall's tau-b of <key> with" in line for line in lines)
    shown = [line.split(":")[0] for line in lines][len(ATTACKS) :]
    families = [re.compile(re.sub("<.+>", ".+", re.escape(name))) for name in shown]
    logged = [tag("robustness", name) for name in logged_keys(PARTS, list(ATTACKS))]
    assert all(any(family.fullmatch(name) for family in families) for name in logged)
    assert all(any(family.fullmatch(name) for name in [*logged, "robustness/masking"]) for family in families)


def test_settings(logger):
    board = Shown([logger])
    board.show(3)
    described = board._settings.describe() | {"head": "'fc' of Identity, 10 classes"}
    assert shown_lines(logger, "settings") == (3, [f"{name}: {value}" for name, value in described.items()])


def test_masking_signs(logger):
    board = Shown([logger])
    board.show(1)
    board.show(2, signs=[SIGN, SIGN._replace(name="other")])
    line = "PGD finds none. It cannot move. Use `Square`."
    assert shown_lines(logger, "masking_signs") == (2, [f"zero_gradients: {line}", f"other: {line}"])


@given(st.text(alphabet="ab<>&|=' \n()-*_[]#`\\!~"))
@example("<a> &lt;")
@example("\n- b")
@example("**a** _b_ `a` [b](a) # a")
def test_texts_are_shown_as_they_are(text):
    page = markdown_to_safe_html(markdown_list([("name", f"x{text}x")]))
    shown = html.unescape(re.sub("<[^<>]+>", lambda tag: "\n" if "br" in tag[0] else "", page))
    assert shown.split() == f"name: x{text}x".split()
    assert page.count("<li>") == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_histograms_of_distances(logger, dtype):
    values = torch.tensor([1.0, torch.nan, 4.0, torch.inf, 2.5, 1e25]).to(dtype)
    Shown([logger]).show(7, histograms={"distances/rdi": values, "distances/roby": values[:1]})
    (event,) = read(logger).Histograms("robustness/distances/rdi")
    histogram = event.histogram_value
    assert event.step == 7
    assert (histogram.num, histogram.min, histogram.max, histogram.sum) == (3, 1.0, 4.0, 7.5)
    assert read(logger).Histograms("robustness/distances/roby")[0].histogram_value.num == 1


def test_nothing_to_show(logger):
    nothing = torch.full((3,), torch.nan)
    Shown([logger]).show(0, histograms={"distances/rdi": nothing, "lambda_log10": torch.zeros(0)})
    assert all_tags(logger) == set()


def pictures(logger, tag):
    images = read(logger).Images(tag)
    arrays = [np.asarray(Image.open(io.BytesIO(image.encoded_image_string))) for image in images]
    return {image.step: array for image, array in zip(images, arrays, strict=True)}


def examples_figure(examples, name, epoch, names=None):
    title = f"true class and prediction under {name}, epoch {epoch}"
    return render(perturbation_figure(examples, SPACE, title, names))


def name_classes(monkeypatch, names):
    monkeypatch.setattr(board_module, "find_class_names", lambda *args: names)


@pytest.mark.parametrize("names", [None, [f"class {number}" for number in range(11)]])
def test_examples_of_each_attack(logger, examples, monkeypatch, names):
    name_classes(monkeypatch, names)
    Shown([logger]).show(3, examples={"pgd": examples})
    assert read(logger).Tags()["images"] == ["robustness/examples/pgd"]
    drawn = pictures(logger, "robustness/examples/pgd")[3]
    np.testing.assert_array_equal(drawn, examples_figure(examples, "pgd", 0, names))


def test_slow_pictures_are_drawn_every_fifth_time_and_at_the_end(logger, examples):
    board, curves = Shown([logger]), {epoch: curve_of(epoch) for epoch in range(8)}
    for epoch, curve in curves.items():
        assert board.draws(is_last=False) == (epoch in (0, 5))
        assert board.draws(is_last=True)
        board.show(10 * epoch, epoch, {"pgd": examples} if epoch < 7 else {}, curve=curve)
    board.show_summary([], step=71)
    board.show_summary([], step=72)
    assert [*pictures(logger, "robustness/examples/pgd")] == [0, 50, 71]
    np.testing.assert_array_equal(
        pictures(logger, "robustness/examples/pgd")[71], examples_figure(examples, "pgd", epoch=6)
    )
    drawn = pictures(logger, "robustness/boundary_curve")
    assert [*drawn] == [0, 50, 71]
    expected = boundary_figure({f"epoch {epoch}": curve for epoch, curve in curves.items()})
    np.testing.assert_array_equal(drawn[71], render(expected))


def rows(y, adv_preds):
    return Rows(torch.arange(len(y)), {"y": torch.tensor(y).long(), "adv_preds": torch.tensor(adv_preds).long()})


def test_classes(logger, monkeypatch):
    name_classes(monkeypatch, ["cat", "dog", "frog", "owl"])
    board = Shown([logger], attacks={"cw": ATTACKS["cw"], "fgsm": PGD(eps=0.1, steps=1)})
    board.show(4, 2, attacks={"cw": rows([0], [1]), "fgsm": rows([0, 0, 1, 1, 3], [0, 1, 1, 1, 0])})
    rates = [0.5, 1.0, torch.nan, 0.0]
    expected = render(class_figure({2: rates}, ["cat", "dog", "frog", "owl"], "fgsm"))
    np.testing.assert_array_equal(pictures(logger, "robustness/classes")[4], expected)


@pytest.mark.parametrize(("y", "adv_preds"), [([3, 100], [3, 3]), ([], [])])
def test_too_many_classes_or_no_samples(logger, y, adv_preds, recwarn):
    Shown([logger]).show(4, attacks={"pgd": rows(y, adv_preds)})
    assert read(logger).Tags()["images"] == []
    assert not recwarn


def test_the_run_is_one_picture_that_comes_first(logger):
    board = Shown([logger])
    board.show(0)
    history = [{"epoch": epoch, "step": 9 + epoch, "acc": 0.5, "adv_acc/pgd": 0.1 * epoch} for epoch in range(3)]
    for number in range(1, 4):
        assert board.show_history(history[:number], step=number) > 0
    drawn = pictures(logger, "Overview of robustness/4 the run")
    assert [*drawn] == [1, 2, 3]
    for number in range(1, 4):
        np.testing.assert_array_equal(drawn[number], render(history_figure(history[:number], "robustness")))


def curve_of(epoch):
    distances = torch.linspace(-0.1, 0.2 + 0.1 * epoch, 50)
    sample = Rows(torch.arange(50), {})
    return BoundaryCurve.of(distances, "linf", 0.1, lambda robust: assist(None, 0, sample, robust))


def test_turned_off(logger, examples):
    full = {"histograms": {"lambda_log10": torch.ones(3)}, "examples": {"pgd": examples}}
    Shown([logger], log_figures=False).show(0, **full, signs=[SIGN], curve=curve_of(0))
    assert all_tags(logger) == {"robustness/masking_signs/text_summary"}


def test_without_matplotlib_there_is_one_warning_and_everything_else(logger, examples, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    board = Shown([logger])
    full = {"examples": {"pgd": examples, "cw": examples}, "histograms": {"lambda_log10": torch.ones(3)}}
    with pytest.warns(UserWarning, match=r'Figures are left out.*pip install "lightning-robustness\[plot\]"') as record:
        board.show(0, **full)
    assert len(record) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        board.show(1, **full)
    assert all_tags(logger) == {"robustness/lambda_log10"}
    assert len(read(logger).Histograms("robustness/lambda_log10")) == 2


def subject_of(embedding, space=SPACE):
    """A subject whose network gives an embedding, and predicts the next class."""
    logits = torch.eye(12)[torch.arange(len(embedding)) % 10 + 1]
    tap = SimpleNamespace(run=lambda forward, x: HeadCall(embedding, logits))
    return SimpleNamespace(
        route=SimpleNamespace(head="fc", num_classes=12, tap=lambda model: tap),
        input_space=space,
        model=torch.nn.Identity(),
        extra_names=(),
        logits_of=lambda batch: None,
        batches=lambda samples, title: [samples],
    )


def embed(logger, x, embedding=None, space=SPACE, **options):
    x = space.normalize(x)
    samples = Samples(x, torch.arange(len(x)) % 10, torch.arange(len(x)))
    sample = SimpleNamespace(take=lambda size, names: samples)
    subject = subject_of(torch.randn(len(x), 4) if embedding is None else embedding, space)
    Shown([logger], log_embeddings=True, **options).show(5, sample=sample, subject=subject)
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
    embed(logger, digits[0][:4], log_figures=False)
    assert [info.HasField("sprite") for info in config(logger)] == [False, False]


def test_nothing_to_embed(logger):
    embed(logger, torch.zeros(0, 1, 8, 8))
    assert not Path(logger.log_dir, "projector_config.pbtxt").exists()


def show_all(loggers, examples):
    board = Shown(loggers, log_embeddings=True)
    sample = SimpleNamespace(take=lambda size, names: Samples(examples.x, examples.y, torch.arange(2)))
    full = {"histograms": {"lambda_log10": torch.ones(3)}, "examples": {"pgd": examples}}
    board.show(4, **full, signs=[SIGN], sample=sample, subject=subject_of(torch.ones(2, 3)))
    board.show_history([{"epoch": 0, "step": 4, "acc": 0.5}])


def test_weights_and_biases(examples, monkeypatch):
    logged, defined = [], []

    class Recorder(WandbLogger):
        experiment = SimpleNamespace(define_metric=lambda name, **options: defined.append((name, options)))

        def __init__(self):
            pass

        def log_metrics(self, metrics, step=None):
            logged.append((step, metrics))

    wandb = SimpleNamespace(Image=lambda image: image, Table=lambda **table: table)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    show_all([Recorder()], examples)
    groups = ("robustness", "robustness_details", "robustness_trust")
    assert defined == [(f"{group}/*", {"step_metric": "epoch", "step_sync": True}) for group in groups]
    glossary, settings, signs, (step, pictures), (last, run) = logged
    assert glossary[1]["robustness/glossary"]["columns"] == ["key", "meaning"]
    table = settings[1]["robustness/settings"]
    assert (settings[0], table["columns"], ["seed", "0"] in table["data"]) == (4, ["setting", "value"], True)
    table = {"columns": ["name", "evidence", "explanation", "remedy"], "data": [list(SIGN)], "dataframe": None}
    assert signs == (4, {"robustness/masking_signs": table})
    assert step == last == 4
    np.testing.assert_array_equal(pictures["robustness/examples/pgd"], [examples_figure(examples, "pgd", 0)])
    whole = history_figure([{"epoch": 0, "step": 4, "acc": 0.5}], "robustness")
    np.testing.assert_array_equal(run["robustness"], [render(whole)])


def test_mlflow(examples):
    logged = []
    client = SimpleNamespace(
        log_image=lambda run, image, key, step: logged.append((run, key, step, image.shape)),
        log_text=lambda run, text, file: logged.append((run, file, text)),
    )
    logger = type("MLFlowLogger", (), {"experiment": client, "run_id": "run", "_prefix": "fold+1"})()
    show_all([logger], examples)
    glossary, settings, signs, picture, run = logged
    assert glossary[:2] == ("run", "fold_1-robustness/glossary.md")
    assert settings[:2] == ("run", "fold_1-robustness/settings.md")
    assert "- **seed**: 0\n" in settings[2]
    assert signs[1] == "fold_1-robustness/masking_signs.md"
    assert picture == ("run", "fold_1-robustness/examples/pgd", 4, examples_figure(examples, "pgd", 0).shape)
    assert run == ("run", "fold_1-robustness", 4, (396, 432, 3))


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


def test_processes_without_a_writer(logger, examples, monkeypatch):
    monkeypatch.setattr("lightning.fabric.loggers.logger.rank_zero_only.rank", 1)
    show_all([logger], examples)
    monkeypatch.setattr("lightning.fabric.loggers.logger.rank_zero_only.rank", 0)
    assert all_tags(logger) == set()
