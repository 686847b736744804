from hypothesis import given, strategies as st

from lit_dlm.decoding.stream import length_buckets


def test_neighbours_in_length_share_a_bucket():
    """Sorted: 2 (index 1), 3 (3), 3 (4), 9 (0), 12 (2); at most two."""
    lengths = [9, 2, 12, 3, 3]
    assert length_buckets(lengths, batch_size=2) == [[1, 3], [4, 0], [2]]


@given(st.lists(st.integers(1, 50)), st.integers(1, 5))
def test_every_sample_is_in_one_bucket_within_the_limit(lengths, batch_size):
    buckets = length_buckets(lengths, batch_size=batch_size)
    assert sorted(i for bucket in buckets for i in bucket) == list(range(len(lengths)))
    assert all(1 <= len(bucket) <= batch_size for bucket in buckets)
