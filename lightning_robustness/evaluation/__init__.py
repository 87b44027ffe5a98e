from lightning_robustness.evaluation.cmmr import CompositeScores, composite_scores
from lightning_robustness.evaluation.compare import compare
from lightning_robustness.evaluation.evaluate import evaluate
from lightning_robustness.evaluation.reports.comparison_report import ComparisonReport
from lightning_robustness.evaluation.reports.robustness_report import RobustnessReport
from lightning_robustness.evaluation.reports.sweep_report import SweepReport
from lightning_robustness.evaluation.sweep import sweep

__all__ = [
    "ComparisonReport",
    "CompositeScores",
    "RobustnessReport",
    "SweepReport",
    "compare",
    "composite_scores",
    "evaluate",
    "sweep",
]
