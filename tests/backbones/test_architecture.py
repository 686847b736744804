"""Checks of a denoiser's description."""

from typing import Any

import pytest

from lit_dlm.backbones.base import BackboneSpec
from tests.backbones.conftest import tiny_architecture


def test_the_specification_always_forbids_the_mask():
    spec = tiny_architecture(forbidden_ids=[0], eos_ids=[1, 2], shift=1).spec()
    assert spec == BackboneSpec(
        family="custom", mask_id=3, pad_id=0, eos_ids=(1, 2), shift=1, forbidden_ids=(0, 3)
    )


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"num_heads": 3}, "num_heads"),
        ({"num_heads": 4, "num_kv_heads": 3}, "num_kv_heads 3"),
        ({"mask_id": 32}, "vocab_size 32"),
        ({"eos_ids": (1, 40)}, "vocab_size 32"),
        ({"eos_ids": ()}, "eos_ids"),
        ({"attention": "block"}, "block_size"),
        ({"shift": 2}, "shift"),
        ({"attention": "causal"}, "attention"),
        ({"positions": "x"}, "positions"),
        ({"block_origin": "x"}, "block_origin"),
    ],
)
def test_impossible_descriptions_are_refused_by_name(changes: dict[str, Any], name: str):
    with pytest.raises(ValueError, match=name):
        tiny_architecture(**changes)


def test_the_digest_follows_sizes_and_specification():
    base = tiny_architecture().digest()
    assert tiny_architecture().digest() == base
    assert tiny_architecture(num_kv_heads=2).digest() == base  # the default, spelled out
    changes: list[dict[str, Any]] = [{"rope_theta": 100.0}, {"positions": "arange"}, {"bos_id": 4}]
    assert len({base, *(tiny_architecture(**change).digest() for change in changes)}) == 4
