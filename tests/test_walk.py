"""Monitor and ``evaluate`` measure with the same code: they differ only in files that know a Trainer or a report."""

import sys
from contextlib import contextmanager
from pathlib import Path

import lightning_robustness
from lightning_robustness import RobustnessMonitor, evaluate
from tests.callbacks.modules import Classifier, make_trainer, train_loader, val_loader

PACKAGE = Path(lightning_robustness.__file__).parent
# Only the monitor compares epochs
MONITOR_ALONE = {"_measurement/verdict.py"}
# Where samples come from, what a failure does, and how results are shown, are the drivers' own
OWN = ("callbacks", "cli", "evaluation", "_lightning", "_display")
SETTINGS = {"eps": 0.1, "fim_samples": 4, "attack_samples": 32, "progress": False}


@contextmanager
def traced():
    """Collect the files of the package below the drivers whose functions are called."""
    files, before = set(), sys.getprofile()

    def note(frame, event, arg):
        path = Path(frame.f_code.co_filename)
        if event == "call" and frame.f_code.co_name != "<module>" and path.is_relative_to(PACKAGE):
            files.add(path.relative_to(PACKAGE).as_posix())

    sys.setprofile(note)
    try:
        yield files
    finally:
        sys.setprofile(before)


def below(files):
    """Leave out the drivers."""
    return {name for name in files if name.split("/")[0] not in OWN}


def test_monitor_and_evaluate_execute_the_same_files(tmp_path):
    module, monitor = Classifier(), RobustnessMonitor(**SETTINGS, log_figures=False)
    trainer = make_trainer(tmp_path, monitor)
    with traced() as watched:
        trainer.fit(module, train_loader(), val_loader())
    with traced() as evaluated:
        report = evaluate(module, val_loader(), **SETTINGS)
        str(report)  # what the monitor logs during the run
    # A success rate takes samples that are right before the attack: without them, no attack would run
    assert {"fim", "asr/worst"} <= monitor.history[0].keys() & report.metrics.keys()
    assert any(name.startswith("_lightning/") for name in watched)
    assert any(name.startswith("evaluation/") for name in evaluated)
    assert below(watched) - below(evaluated) == MONITOR_ALONE
    assert below(evaluated) - below(watched) == set()
    assert {"_measurement/meters/__init__.py", "_measurement/meters/attack.py", "_model/route.py"} <= below(watched)
