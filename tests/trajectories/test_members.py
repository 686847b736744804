"""Features are stored beside their records, in every layout, and join no others."""

from dataclasses import replace

import numpy as np
import pytest

from lit_dlm.trajectories import TrajectoryFormatError
from lit_dlm.trajectories.features import ONLY_MASKED
from lit_dlm.trajectories.format import read_block, records_of
from lit_dlm.trajectories.members import (
    attach_features,
    decode_members,
    encode_members,
    only_masked,
)
from tests.trajectories.samples import (
    assert_all_same,
    random_features,
    random_record,
    records_of as samples,
)


@pytest.mark.parametrize("scheme", ["int8", "fp16"])
@pytest.mark.parametrize("layout", ["generation", "all", *ONLY_MASKED])
def test_features_round_trip(scheme, layout):
    """One record without features in between; of masked rows alone, others take no room."""
    rng = np.random.default_rng(3)
    records = [random_record(rng, f"u{i}", num_generated=14 + i, remask=0.05) for i in range(5)]
    whole, kept = list(records), [[] for _ in records]
    for i in (0, 1, 3, 4):
        record = records[i]
        width = record.num_generated + (record.num_prompt if layout == "all" else 0)
        features = random_features(rng, width, record.num_steps, scheme=scheme)
        whole[i] = records[i] = replace(record, features=replace(features, layout=layout))
        kept[i] = features.kept_steps.tolist()
        if layout in ONLY_MASKED:
            whole[i] = replace(record, features=features)
            of_all = replace(features, layout="logits") if layout == "logits" else features
            records[i] = replace(record, features=only_masked(record, of_all))
    data, features_data = encode_members(records)
    if layout in ONLY_MASKED:
        assert len(features_data) < 0.75 * len(encode_members(whole)[1])
    assert_all_same(records, decode_members(data, features_data)[1])
    assert [steps.tolist() for steps in read_block(data).kept_steps] == kept


def test_features_do_not_join_other_records():
    records = samples(3, features=True)
    data, features = encode_members(records)
    for others in (
        [replace(records[0], uid="x"), *records[1:]],
        records[:1],
        [replace(r, features=None) for r in records],
    ):
        block = read_block(encode_members(others)[0])
        with pytest.raises(TrajectoryFormatError, match="features are of other records"):
            attach_features(block, records_of(block), features)
    with pytest.raises(TrajectoryFormatError, match=r"'features'\] missing"):
        decode_members(data, data)
