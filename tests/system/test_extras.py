import tomllib
from pathlib import Path

from lit_dlm.system.extras import pip_install, required

PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def test_an_extra_is_installed_by_what_it_requires():
    """``lit-dlm[code]`` cannot be, since ``lit-dlm`` is not on PyPI."""
    extras = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]
    assert pip_install(required("code")) == "pip install 'evalplus==0.3.1'"
    for extra in ("eval", "log", "pictures"):
        names = " ".join(f"'{name}'" for name in extras[extra])
        assert pip_install(required(extra)) == f"pip install {names}"
    always = {one.name for one in required()}
    assert "torch" in always
    assert not {"evalplus", "wandb"} & always
