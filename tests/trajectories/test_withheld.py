from __future__ import annotations

import hashlib
import struct
from dataclasses import replace

import numpy as np
import pytest

from lit_dlm.trajectories.codec import decode_block, encode_block
from lit_dlm.trajectories.errors import ChecksumError, InvariantError
from lit_dlm.trajectories.withheld import WithheldTrajectory, prompt_digest
from tests.trajectories.samples import assert_same, random_record


def records() -> list:
    rng = np.random.default_rng(0)
    return [
        random_record(rng, f"u{i}", num_prompt=3 * i, remask=0.1, signals=True) for i in range(3)
    ]


def test_prompt_digest_is_sha256_of_the_ids_as_32_bit_numbers() -> None:
    expected = hashlib.sha256(struct.pack("<3I", 5, 6, 70_000)).digest()[:16]
    assert prompt_digest(np.array([5, 6, 70_000], dtype=np.int32)) == expected


def test_a_block_without_prompts_replays_and_gets_them_back() -> None:
    before = records()
    data = encode_block(before, withhold_prompts=True)
    assert len(data) < len(encode_block(before)) + 16 * 3
    for whole, part in zip(before, decode_block(data), strict=True):
        assert isinstance(part, WithheldTrajectory)
        assert (len(part.prompt_ids), part.num_prompt) == (0, whole.num_prompt)
        assert part.digest() == whole.digest()
        np.testing.assert_array_equal(part.all_states(), whole.all_states())
        with pytest.raises(ValueError, match=f"'{whole.uid}': the block withholds its prompt"):
            part.canvas()
        assert_same(whole, part.with_prompt(whole.prompt_ids))


def test_another_prompt_is_refused() -> None:
    part = decode_block(encode_block(records(), withhold_prompts=True))[1]
    with pytest.raises(ChecksumError, match="not the prompt of 3 tokens") as error:
        part.with_prompt([1, 2, 3])
    assert error.value.record == "u1"
    whole = records()[1]
    forged = replace(part, content_digest=bytes(16))
    with pytest.raises(ChecksumError, match="content digest"):
        forged.with_prompt(whole.prompt_ids)


def test_such_records_are_written_again_only_without_prompts() -> None:
    data = encode_block(records(), withhold_prompts=True)
    read = decode_block(data)
    assert encode_block(read, withhold_prompts=True) == data
    with pytest.raises(InvariantError, match="'u0': its prompt is withheld"):
        encode_block(read)
