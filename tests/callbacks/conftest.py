from io import BytesIO

import pytest
from PIL import Image


@pytest.fixture(autouse=True)
def _unpainted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots are made up to their pixels, which take seconds; tests of reports look at those."""
    one_pixel = BytesIO()
    Image.new("L", (1, 1)).save(one_pixel, "PNG")
    monkeypatch.setattr("lit_dlm.reports.plots.figure_bytes", lambda *_, **__: one_pixel.getvalue())
