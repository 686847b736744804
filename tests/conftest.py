"""Hooks of the whole suite."""

import gc
import logging
import os
import runpy
from collections.abc import Callable
from copy import copy
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

# Before torch is imported: sums depend on the number of threads, and forked processes have one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A busy machine fails no test, and the examples are the same in every run and process.
settings.register_profile(
    "suite",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
# `make fuzz`: other examples in every run.
settings.register_profile(
    "fuzz",
    max_examples=5000,
    phases=[Phase.explicit, Phase.generate, Phase.target, Phase.shrink],
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("suite")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts slow tests first and gives them time on a busy machine.

    The longest take a minute on one that is not; begun last, one process would wait for them.
    """
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    for item in items:
        is_long = item.get_closest_marker("slow") or item.get_closest_marker("ddp")
        if is_long and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(1200))


def pytest_collection_finish() -> None:
    """Keeps what collection made out of garbage collection, which every test would walk again."""
    _read_signatures_once()
    gc.collect()
    gc.freeze()


def _read_signatures_once() -> None:
    """Of protocols and of what is compared with them: every command line parses their modules."""
    from jsonargparse import _typehints

    read = _typehints.get_protocol_method_signature

    @cache
    def known(kind: type, name: str) -> Any:
        return read(kind, name, logging.getLogger("jsonargparse"))

    def get(kind: type, name: str, _logger: Any) -> Any:
        parameters, returned = known(kind, name)
        return [copy(one) for one in parameters], returned

    _typehints.get_protocol_method_signature = get


@pytest.fixture
def unpainted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots are made up to their pixels, which take seconds; tests of reports look at those."""
    from PIL import Image

    one_pixel = BytesIO()
    Image.new("L", (1, 1)).save(one_pixel, "PNG")
    monkeypatch.setattr("lit_dlm.reports.plots.figure_bytes", lambda *_, **__: one_pixel.getvalue())


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | Path], dict[str, Any]]:
    """Gives what a script defines that lies outside of the packages, by its path from the root."""

    def names(script: str | Path) -> dict[str, Any]:
        path = Path(__file__).parents[1] / script
        monkeypatch.syspath_prepend(str(path.parent))
        return runpy.run_path(str(path), run_name="imported")

    return names
