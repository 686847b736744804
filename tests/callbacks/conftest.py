import pytest


@pytest.fixture(autouse=True)
def _unpainted(unpainted: None) -> None:
    """In every test of this folder."""
