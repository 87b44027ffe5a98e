from lightning_robustness.evaluation.compare import compare
from lightning_robustness.evaluation.comparison_report import ComparisonReport
from lightning_robustness.evaluation.evaluate import evaluate
from lightning_robustness.evaluation.robustness_report import RobustnessReport
from lightning_robustness.evaluation.sweep import sweep
from lightning_robustness.evaluation.sweep_report import SweepReport

__all__ = ["ComparisonReport", "RobustnessReport", "SweepReport", "compare", "evaluate", "sweep"]
