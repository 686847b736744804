"""The table of short names holds what can be configured, and is right about where it is."""

import inspect
import pkgutil
from collections.abc import Iterator
from importlib import import_module

from lightning.pytorch import Callback, LightningDataModule, LightningModule, callbacks, loggers
from torch import optim

import lit_dlm
from lit_dlm.config.components import Component
from lit_dlm.config.names import NAMES

OPTIONAL = {
    *("lit_dlm.commands.lm_eval", "lit_dlm.commands.evaluation"),  # lm-eval
    "lit_dlm.serve.api",  # FastAPI
}


def test_every_name_is_a_class_where_the_table_says():
    for name, path in NAMES.items():
        assert inspect.isclass(getattr(import_module(path.rpartition(".")[0]), name)), path


def _below(kind: type) -> Iterator[type]:
    for one in kind.__subclasses__():
        yield from (one, *_below(one))


def test_every_component_module_and_callback_has_a_short_name():
    modules = pkgutil.walk_packages(lit_dlm.__path__, "lit_dlm.")
    for name in {one.name for one in modules} - OPTIONAL:
        if not name.startswith("lit_dlm.grading.child"):
            import_module(name)
    bases = (Component, LightningModule, LightningDataModule, Callback)
    found = {one for base in bases for one in _below(base)}
    own = [one for one in found if one.__module__.startswith("lit_dlm.")]
    configured = {
        f"{one.__module__}.{one.__name__}"
        for one in own
        if one.__qualname__.isidentifier()
        and one.__name__[0] != "_"
        and not inspect.isabstract(one)
    }
    assert len(configured) > 130
    # The command line and training make them by themselves.
    assert configured - set(NAMES.values()) == {
        "lit_dlm.config.saved.RunConfigCallback",
        "lit_dlm.tracelock.forks.ForkedPolicy",
    }


def test_classes_of_lightning_and_torch_that_can_be_built_have_short_names():
    """Those of Lightning that have our names are known by their import paths."""
    listed = [(callbacks, Callback), (loggers, loggers.Logger), (optim, optim.Optimizer)]
    for module, base in listed:
        kinds = [getattr(module, name) for name in module.__all__]
        names = {one.__name__ for one in kinds if inspect.isclass(one) and issubclass(one, base)}
        bases = {"Checkpoint", "BaseFinetuning", "BasePredictionWriter", "ProgressBar"}
        assert names - bases - {base.__name__} <= NAMES.keys()
