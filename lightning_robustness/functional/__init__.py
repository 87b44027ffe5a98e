from lightning_robustness.functional.robustness_difference_index import robustness_difference_index
from lightning_robustness.functional.roby import feature_subspace_aggregation, feature_subspace_distance, roby

__all__ = [
    "feature_subspace_aggregation",
    "feature_subspace_distance",
    "robustness_difference_index",
    "roby",
]
