import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_dlm.decoding.buckets import length_buckets


def test_neighbours_in_length_share_a_bucket():
    """Sorted: 2 (index 1), 3 (3), 3 (4), 9 (0), 12 (2); at most two, at most 3 tokens apart."""
    lengths = [9, 2, 12, 3, 3]
    assert length_buckets(lengths, batch_size=2) == [[1, 3], [4, 0], [2]]
    assert length_buckets(lengths, batch_size=2, max_spread=3) == [[1, 3], [4], [0, 2]]


@given(st.lists(st.integers(1, 50)), st.integers(1, 5), st.none() | st.integers(0, 10))
def test_every_sample_is_in_one_bucket_within_the_limits(lengths, batch_size, max_spread):
    buckets = length_buckets(lengths, batch_size=batch_size, max_spread=max_spread)
    assert sorted(i for bucket in buckets for i in bucket) == list(range(len(lengths)))
    for bucket in buckets:
        assert 1 <= len(bucket) <= batch_size
        spread = max(lengths[i] for i in bucket) - min(lengths[i] for i in bucket)
        assert max_spread is None or spread <= max_spread


def test_bad_limits_are_refused():
    with pytest.raises(ValueError, match="batch_size: expected at least 1, got 0"):
        length_buckets([1], batch_size=0)
    with pytest.raises(ValueError, match="max_spread: expected 0 or more, got -1"):
        length_buckets([1], batch_size=1, max_spread=-1)
