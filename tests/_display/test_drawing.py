import sys

import matplotlib.pyplot as plt
import pytest

from lightning_robustness._display.drawing import new_figure


def test_figure_has_the_size_and_is_unknown_to_pyplot():
    plt.close("all")
    assert new_figure(3.0, 2.0).get_size_inches().tolist() == [3.0, 2.0]
    assert plt.get_fignums() == []


@pytest.mark.parametrize("module", ["matplotlib.figure", "matplotlib.backends.backend_agg"])
def test_matplotlib_is_optional(monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "lightning-robustness\[plot\]"'):
        new_figure(1.0, 1.0)
