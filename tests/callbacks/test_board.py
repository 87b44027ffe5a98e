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
from torch.utils.tensorboard import SummaryWriter

from lightning_robustness.attacks import MaskingSign
from lightning_robustness.callbacks import board as board_module
from lightning_robustness.callbacks.board import Board
from lightning_robustness.callbacks.figures import (
    boundary_figure,
    class_figure,
    perturbation_figure,
)
from lightning_robustness.callbacks.history_figure import history_figure
from lightning_robustness.callbacks.sinks import markdown_list
from lightning_robustness.measurement.attack_meter import Examples
from lightning_robustness.measurement.attack_outcome import AttackOutcome
from lightning_robustness.measurement.boundary_curve import BoundaryCurve
from lightning_robustness.measurement.keys import logged_keys, tag
from lightning_robustness.measurement.threat_model import AttackFacts
from lightning_robustness.utilities.drawing import render
from lightning_robustness.utilities.input_space import InputSpace

SPACE = InputSpace(mean=0.5, std=0.25)
NOTHING = {"epoch": 0, "histograms": {}, "examples": {}, "outcomes": {}, "signs": [], "input_space": SPACE}
SIGN = MaskingSign("zero_gradients", "PGD finds none.", "It cannot move.", "Use `Square`.")

KEYS = [
    tag("", name).removeprefix("/")
    for name in (
        *("acc", "adv_acc/pgd", "adv_acc/cw", "adv_acc/worst", "asr/pgd", "asr/cw"),
        *("rdi", "rdi_intra", "rdi_embedding", "roby", "fsa", "fim"),
        *("fim_inverse", "clever", "lipschitz", "distortion/pgd", "distortion/cw", "boundary", "boundary_acc"),
        *("seconds/features", "samples", "masking", "trust/rdi", "trust/fim", "trust/boundary_acc"),
        *(f"adv_acc_{end}/{name}" for end in ("low", "high") for name in ("pgd", "cw", "worst")),
    )
]
ATTACKS = {
    "pgd": AttackFacts({"linf": 8 / 255}, "8 steps"),
    "cw": AttackFacts({}, "C&W from a DDN start, 16 + 2 steps", l2_budget=0.2),
}
PARTS = ["features", "fim", "trust"]
ATTACKED = {
    f"Accuracy under the {name} attack, 95 % interval": [f"adv_acc/{name}"]
    + [f"debug/adv_acc_{end}/{name}" for end in ("low", "high")]
    for name in ("worst", "pgd", "cw")
}
SUCCESS = {"Success rate: pgd, cw": ["asr/cw", "asr/pgd"]}
OTHERS = {
    "RDI": ["rdi"],
    "ROBY": ["roby"],
    "Clean accuracy": ["acc"],
    "Fisher information": ["fim"],
    "Distance to the boundary": ["boundary"],
    "Robust accuracy to first order": ["boundary_acc"],
    "Distortion of the cw attack": ["distortion/cw"],
    "Trust": ["trust/boundary_acc", "trust/rdi"],
}


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
        category["title"]: {chart["title"]: found(plugin, chart) for chart in category["chart"]}
        for category in json.loads(layout)["category"]
    }


def found(plugin, chart):
    """Tags as its page asks for them: those of a margin as they are, others as regular expressions."""
    if "margin" in chart:
        (series,) = chart["margin"]["series"]
        tags = [series[part] for part in ("value", "lower", "upper")]
        return [tag for tag in tags if matches(plugin, re.escape(tag)) == [tag]]
    return matches(plugin, "|".join(f"({tag})" for tag in chart["multiline"]["tag"]))


def matches(plugin, expression):
    return sorted(plugin.scalars_impl(RequestContext(), "run", expression, "")["tag_to_events"])


def charts_of(prefix):
    groups = {"success of attacks": SUCCESS, "accuracy under attack": ATTACKED, "other values": OTHERS}
    return {
        f"{prefix}: {group}": {title: [f"{prefix}/{key}" for key in keys] for title, keys in shown.items()}
        for group, shown in groups.items()
    }


def open_board(logger, prefix, step=0, attacks=ATTACKS, parts=PARTS):
    Board([logger], prefix).open({}, attacks, step=step, parts=parts)


def test_charts_find_their_values(logger):
    logger.log_metrics({f"{p}/{key}": 1.0 for p in ("robustness", "robustness2") for key in KEYS}, step=1)
    open_board(logger, "robustness")
    assert charts(logger) == charts_of("robustness")
    assert [[*group] for group in charts(logger).values()] == [[*SUCCESS], [*ATTACKED], [*OTHERS]]


def test_all_boards_of_a_run_get_their_charts(logger):
    prefixes = ["robustness", "second+monitor.", "test_robustness"]
    logger.log_metrics({f"{prefix}/{key}": 1.0 for prefix in prefixes for key in KEYS}, step=1)
    for prefix in prefixes[:2]:
        open_board(logger, prefix)
    logger.finalize("success")  # as `fit` does, before `test`
    open_board(logger, prefixes[2], step=9)
    assert charts(logger) == charts_of(prefixes[0]) | charts_of(prefixes[1]) | charts_of(prefixes[2])


def test_runs_do_not_mix(logger, tmp_path):
    other = TensorBoardLogger(tmp_path, name="other")
    Board([logger], "first").open({}, {}, step=0)
    Board([logger, other], "second").open({}, {}, step=0)
    assert [*charts(logger)] == ["first: other values", "second: other values"]
    assert [*charts(other)] == ["second: other values"]


def test_prefix_of_the_logger(tmp_path, examples):
    logger = TensorBoardLogger(tmp_path, prefix="fold1")
    logger.log_metrics({f"robustness/{key}": 1.0 for key in KEYS}, step=1)
    open_board(logger, "robustness")
    assert charts(logger) == charts_of("fold1-robustness")
    Board([logger], "robustness").show(3, **NOTHING | {"examples": {"pgd": examples}})
    assert read(logger).Tags()["images"] == ["fold1-robustness/examples/pgd"]


def test_charts_of_parts_without_attacks(logger):
    logger.log_metrics({f"robustness/{key}": 1.0 for key in KEYS}, step=1)
    open_board(logger, "robustness", attacks={}, parts=["clever"])
    assert charts(logger) == {"robustness: other values": {"CLEVER": ["robustness/clever"]}}


def test_glossary(logger):
    open_board(logger, "robustness", step=3, parts=["clever"])
    ((step, text),) = texts(logger, "robustness/glossary/text_summary")
    lines = text.splitlines()
    assert step == 3
    assert lines[0] == "- **attack pgd**: 8 steps, perturbations of at most 8/255 in linf"
    assert lines[1] == "- **attack cw**: C&amp;W from a DDN start, 16 + 2 steps, l2 &lt;= 0.2"
    assert lines[2].startswith("- **clever**: mean CLEVER score: ")
    assert lines[2].endswith(" (higher is more robust)")
    names = [line.split("**")[1] for line in lines[3:]]
    assert names == [*(f"{kind}/&lt;attack&gt;" for kind in ("adv_acc", "asr", "distortion")), "masking"]


def test_glossary_has_every_key_that_is_logged(logger):
    open_board(logger, "robustness")
    ((_, text),) = texts(logger, "robustness/glossary/text_summary")
    assert "Kendall's tau-b of <key> with" in html.unescape(re.sub("<[^<>]+>", "", markdown_to_safe_html(text)))
    shown = [html.unescape(line.split("**")[1]) for line in text.splitlines()][len(ATTACKS) :]
    families = [re.compile(re.sub("<.+>", ".+", re.escape(name))) for name in shown]
    logged = [tag("", name)[1:] for name in logged_keys(PARTS, list(ATTACKS))]
    assert all(any(family.fullmatch(name) for family in families) for name in logged)
    assert all(any(family.fullmatch(name) for name in [*logged, "masking"]) for family in families)


def test_settings(logger):
    Board([logger], "robustness").open({"attacks": "pgd: PGD(eps=0.1)", "seed": "0"}, ATTACKS, step=3)
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


def pictures(logger, tag):
    images = read(logger).Images(tag)
    arrays = [np.asarray(Image.open(io.BytesIO(image.encoded_image_string))) for image in images]
    return {image.step: array for image, array in zip(images, arrays, strict=True)}


def examples_figure(examples, name, epoch, names=None):
    title = f"true class and prediction under {name}, epoch {epoch}"
    return render(perturbation_figure(examples, SPACE, title, names))


def test_examples_of_each_attack(logger, examples):
    board = Board([logger], "robustness")
    board.show(3, **NOTHING | {"examples": {"pgd": examples, "cw": Examples(*(part[:0] for part in examples))}})
    assert read(logger).Tags()["images"] == ["robustness/examples/pgd"]
    np.testing.assert_array_equal(
        pictures(logger, "robustness/examples/pgd")[3], examples_figure(examples, "pgd", epoch=0)
    )


def test_names_of_classes(logger, examples):
    names = [f"class {number}" for number in range(11)]
    board = Board([logger], "robustness", class_names=names)
    board.show(3, **NOTHING | {"examples": {"pgd": examples}})
    np.testing.assert_array_equal(
        pictures(logger, "robustness/examples/pgd")[3], examples_figure(examples, "pgd", 0, names)
    )


def test_slow_pictures_are_drawn_every_fifth_time_and_at_the_end(logger, examples):
    board, curves = Board([logger], "robustness"), {epoch: curve_of(epoch) for epoch in range(8)}
    for epoch, curve in curves.items():
        shown = {"pgd": examples} if epoch < 7 else {}
        board.show(10 * epoch, **NOTHING | {"epoch": epoch, "examples": shown}, curve=curve)
    board.draw_waiting(71)
    board.draw_waiting(72)
    assert [*pictures(logger, "robustness/examples/pgd")] == [0, 50, 71]
    np.testing.assert_array_equal(
        pictures(logger, "robustness/examples/pgd")[71], examples_figure(examples, "pgd", epoch=6)
    )
    drawn = pictures(logger, "robustness/boundary_curve")
    assert [*drawn] == [0, 50, 71]
    np.testing.assert_array_equal(drawn[71], render(boundary_figure(curves)))


def outcome(y, adv_preds):
    parts = dict.fromkeys(AttackOutcome._fields, torch.zeros(len(y)))
    return AttackOutcome(**parts | {"y": torch.tensor(y), "adv_preds": torch.tensor(adv_preds)})


def test_classes(logger):
    board = Board([logger], "robustness", class_names=["cat", "dog", "frog", "owl"])
    board.open({}, {"cw": AttackFacts({}, ""), "fgsm": AttackFacts({"linf": 0.1}, "")}, step=0)
    found = {"cw": outcome([0], [1]), "fgsm": outcome([0, 0, 1, 1, 3], [0, 1, 1, 1, 0])}
    board.show(4, **NOTHING | {"epoch": 2, "outcomes": found})
    rates = torch.tensor([0.5, 1.0, torch.nan, 0.0])
    expected = render(class_figure({2: rates}, ["cat", "dog", "frog", "owl"], "fgsm"))
    np.testing.assert_array_equal(pictures(logger, "robustness/classes")[4], expected)


def test_too_many_classes(logger):
    board = Board([logger], "robustness")
    board.open({}, ATTACKS, step=0)
    board.show(4, **NOTHING | {"outcomes": {"pgd": outcome([3, 100], [3, 3])}})
    assert read(logger).Tags()["images"] == []


def test_the_run_is_one_picture_that_comes_first(logger):
    board = Board([logger], "robustness")
    history = [{"epoch": epoch, "step": 9 + epoch, "acc": 0.5, "adv_acc/pgd": 0.1 * epoch} for epoch in range(3)]
    for number in range(1, 4):
        board.show_run(history[:number], number)
    drawn = pictures(logger, "robustness")
    assert [*drawn] == [1, 2, 3]
    for number in range(1, 4):
        np.testing.assert_array_equal(drawn[number], render(history_figure(history[:number], "robustness")))


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


def embed(logger, x, embedding=None, space=SPACE, more=None, **kwargs):
    y = torch.arange(len(x)) % 10
    embedding = torch.randn(len(x), 4) if embedding is None else embedding
    Board([logger], "robustness", **kwargs).embed(5, embedding, y, y + 1, space.normalize(x), space, **more or {})
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
    assert rows == [["label", "prediction", "input"], *([str(label), str(label + 1), "clean"] for label in range(5))]
    expected = np.repeat(x.permute(0, 2, 3, 1).numpy(), 3, axis=3)
    np.testing.assert_allclose(cut_tiles(folder, 8, 5), expected, atol=1 / 255)
    (info,) = config(logger)
    assert info.tensor_name == "robustness/embedding:00005"
    assert info.sprite.single_image_dim == [8, 8]
    for path in (info.tensor_path, info.metadata_path, info.sprite.image_path):
        assert path.startswith("00005/robustness%2fembedding/")


def test_projector_joins_points(logger):
    """The page draws a line to the point whose index is in the column ``__next__``."""
    names, more = list("abcd"), {"kinds": ["clean", "clean", "pgd"], "following": [None, 2, None]}
    folder = embed(logger, torch.randn(3, 9), space=InputSpace(None, None), more=more, class_names=names)
    rows = [line.split("\t") for line in Path(folder, "metadata.tsv").read_text().splitlines()]
    assert rows == [
        ["label", "prediction", "input", "__next__"],
        ["a", "b", "clean", ""],
        ["b", "c", "clean", "2"],
        ["c", "d", "pgd", ""],
    ]


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
    board.open({"seed": "0"}, ATTACKS, step=0)
    full = {"histograms": {"lambda_log10": torch.ones(3)}, "examples": {"pgd": examples}}
    board.show(4, **NOTHING | full | {"signs": [SIGN]})
    board.show_run([{"epoch": 0, "step": 4, "acc": 0.5}], 4)
    board.embed(4, torch.ones(2, 3), examples.y, examples.preds, examples.x, SPACE)


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
    assert defined == [("robustness/*", {"step_metric": "epoch", "step_sync": True})]
    glossary, settings, signs, (step, pictures), (last, run) = logged
    assert glossary[1]["robustness/glossary"]["columns"] == ["key", "meaning"]
    table = {"columns": ["setting", "value"], "data": [["seed", "0"]], "dataframe": None}
    assert settings == (0, {"robustness/settings": table})
    table = {"columns": ["name", "evidence", "explanation", "remedy"], "data": [list(SIGN)], "dataframe": None}
    assert signs == (4, {"robustness/masking_signs": table})
    assert step == last == 4
    np.testing.assert_array_equal(pictures["robustness/examples/pgd"], [examples_figure(examples, "pgd", 0)])
    np.testing.assert_array_equal(
        run["robustness"], [render(history_figure([{"epoch": 0, "step": 4, "acc": 0.5}], "robustness"))]
    )


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
    assert settings == ("run", "fold_1-robustness/settings.md", "- **seed**: 0")
    assert signs[1] == "fold_1-robustness/masking_signs.md"
    assert picture == ("run", "fold_1-robustness/examples/pgd", 4, examples_figure(examples, "pgd", 0).shape)
    assert run == ("run", "fold_1-robustness", 4, (360, 504, 3))


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
