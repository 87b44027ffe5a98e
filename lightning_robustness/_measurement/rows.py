from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """Results per sample, on the CPU: the samples' positions, columns by name, and the seconds that they took."""

    positions: Tensor
    columns: Mapping[str, Tensor]
    seconds: float = 0.0

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, name: str) -> Tensor:
        return self.columns[name]

    @classmethod
    def join(cls, ranks: Iterable[Iterable["Rows"]]) -> "Rows":
        """Put the rows of all processes in the order of their positions; the slowest process counts.

        Parts without samples need no columns.
        """
        ranks = [list(parts) for parts in ranks]
        parts = [part for own in ranks for part in own if len(part)]
        positions = torch.cat([torch.zeros(0, dtype=torch.long), *(part.positions for part in parts)])
        order = positions.argsort(stable=True)
        names = parts[0].columns if parts else ()
        columns = {name: torch.cat([part[name] for part in parts])[order] for name in names}
        seconds = max((sum(part.seconds for part in own) for own in ranks), default=0.0)
        return cls(positions[order], columns, seconds)
