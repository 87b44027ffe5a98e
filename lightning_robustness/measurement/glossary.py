from collections.abc import Iterable

from lightning_robustness.measurement.keys import KEYS, find_key
from lightning_robustness.utilities.table import Table


def glossary(names: Iterable[str]) -> Table:
    """Explain values, one line for each, and one for all members of a family.

    Args:
        names: Names of values without prefix; those that the table of keys does not have are left out.

    Example:
        >>> from lightning_robustness.measurement.glossary import glossary
        >>> print(glossary(["acc", "asr/pgd", "asr/cw", "epoch"]).to_text())
        Terms
        key           meaning                                               unit   more robust
        acc           clean accuracy, if there are labels                   share
        asr/<attack>  attack success rate: share of the correctly classified
        ...

    """
    explained = {key.glossary for key in map(find_key, names) if key is not None}
    known = [key for key in KEYS if key.glossary in explained and key.role != "bookkeeping"]
    rows = [[key.name, key.glossary, key.unit, key.direction] for key in known]
    return Table("Terms", ["key", "meaning", "unit", "more robust"], rows, folded=True)
