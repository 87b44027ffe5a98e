from collections.abc import Iterable

from lightning_robustness.measurement.keys import KEYS, Key, get_key
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
    names = list(names)
    known = [key for key in KEYS if any(_belongs(name, key) for name in names)]
    rows = [[key.name, key.glossary, key.unit, key.direction] for key in known if key.role != "bookkeeping"]
    return Table("Terms", ["key", "meaning", "unit", "more robust"], rows, folded=True)


def _belongs(name: str, key: Key) -> bool:
    try:
        return get_key(name).glossary == key.glossary
    except ValueError:
        return False
