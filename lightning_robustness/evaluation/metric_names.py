"""How metrics are called in tables and figures, and which direction is more robust."""

from typing import NamedTuple


class MetricName(NamedTuple):
    """A name for people, and whether higher values are more robust."""

    label: str
    higher_is_better: bool


# By the keys that the monitor logs
ATTACK_FREE = {
    "rdi": MetricName("RDI", True),
    "rdi_embedding": MetricName("RDI of the embedding", True),
    "roby": MetricName("ROBY", False),
    "fsa": MetricName("FSA", True),
    "fsd": MetricName("FSD", True),
    "fim": MetricName("Fisher information", False),
    "fim_geometric": MetricName("Fisher, geometric mean", False),
    "fim_inverse": MetricName("Fisher, inverse", True),
    "lipschitz": MetricName("Lipschitz constant", False),
    "clever": MetricName("CLEVER", True),
}
