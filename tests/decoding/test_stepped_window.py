"""The release's step accounting of its baselines, and ours of the same methods."""

import pytest
import torch

from lit_dlm.decoding import BlockWindow, Decoder, NoQuota, ThresholdPolicy, prompt_canvas
from lit_dlm.decoding.windows import SteppedBlockWindow
from tests.fakes import TableBackbone, fake_spec


def steps(window: object, length: int = 256) -> tuple[int, int]:
    """Steps and idle steps of Fast-dLLM on a model that is sure everywhere."""
    table = torch.zeros(1 + length, 8)
    table[:, 5] = 30.0
    canvas = prompt_canvas([[3]], response_length=length, spec=fake_spec(), seeds=[0])
    plugs = Decoder(policy=ThresholdPolicy(0.9), quota=NoQuota(), window=window)  # type: ignore[arg-type]
    result = plugs(TableBackbone(table), canvas)
    assert result.status == ["complete"]
    return int(result.num_steps[0]), int(result.idle_steps[0])


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        # Block 0 in step 0, idle to step 127, block 1 in step 128.
        (SteppedBlockWindow(128, steps=256), (129, 127)),
        # The last of 8 blocks begins at step 224; 8 steps write.
        (SteppedBlockWindow(32, steps=256), (225, 217)),
        (BlockWindow(128), (2, 0)),
        (BlockWindow(32), (8, 0)),
    ],
)
def test_blocks_of_the_release_idle_and_ours_advance_when_they_are_full(window, expected) -> None:
    assert steps(window) == expected


def test_text_is_the_same_whatever_idles() -> None:
    """Idle steps change the count only."""
    table = torch.randn(17, 8, generator=torch.Generator().manual_seed(0)) * 3
    canvas = prompt_canvas([[3]], response_length=16, spec=fake_spec(), seeds=[0])
    results = [
        Decoder(policy=ThresholdPolicy(0.6), quota=NoQuota(), window=window)(
            TableBackbone(table), canvas
        )
        for window in (SteppedBlockWindow(8, steps=16), BlockWindow(8))
    ]
    assert torch.equal(results[0].ids, results[1].ids)
    assert results[0].num_steps > results[1].num_steps


def test_uneven_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 24 tokens"):
        steps(SteppedBlockWindow(24), length=64)
    with pytest.raises(ValueError, match="expected BlockWindow or FullWindow"):
        SteppedBlockWindow().bounds(3, start=1, length=9, first=0)
