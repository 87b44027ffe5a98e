import sys

import pytest

from lightning_robustness._display.drawing import new_figure


@pytest.mark.parametrize("module", ["matplotlib.figure", "matplotlib.backends.backend_agg"])
def test_matplotlib_is_optional(monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "lightning-robustness\[plot\]"'):
        new_figure(1.0, 1.0)
