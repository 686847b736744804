import copy
import pickle
from dataclasses import dataclass, replace

import pytest
import torch

from lit_dlm.config.components import checked_component
from lit_dlm.decoding import CommitPolicy, Decoder, Selection
from lit_dlm.generation import generate
from lit_dlm.rewards.base import Reward
from lit_dlm.tasks import PromptExample
from lit_dlm.tasks.base import check_uids


class LeftmostPolicy:
    def select(self, state, candidates, proposal, quota) -> Selection:
        columns = torch.arange(candidates.shape[1]).float().expand_as(candidates)
        commit = candidates & (candidates.cumsum(1) == 1)
        return Selection(commit, -columns)


def test_a_class_with_select_alone_is_a_policy_and_own_values_win():
    """One of four cells per step."""
    policy = LeftmostPolicy()
    done = generate("tiny", ["Hi"], decode=Decoder(policy=policy), response_length=4)
    assert done.num_steps == [4]
    assert (policy.requires, policy.forwards_per_step) == (frozenset(), 0)
    assert done.decoder["policy"] == {"name": f"{__name__}.LeftmostPolicy"}

    class Costly(LeftmostPolicy):
        forwards_per_step = 1

    assert checked_component(Costly(), CommitPolicy, option="policy").forwards_per_step == 1


@dataclass(frozen=True, slots=True)
class SettledPolicy(LeftmostPolicy):
    width: int = 3


@pytest.mark.parametrize("kind", [LeftmostPolicy, SettledPolicy])
def test_a_users_class_stays_as_it_is_and_its_objects_can_be_copied(kind):
    made = checked_component(kind(), CommitPolicy, option="policy")
    assert not hasattr(kind, "requires")
    for policy in (made, pickle.loads(pickle.dumps(made)), copy.deepcopy(made)):
        assert isinstance(policy, kind)
        assert policy.requires == frozenset()
        assert type(policy).denoise is CommitPolicy.denoise
        assert getattr(policy, "width", 3) == 3


def test_a_missing_member_is_named():
    class Nothing: ...

    class Unnamed:
        def score(self, group): ...

    with pytest.raises(ValueError, match="policy: Nothing has no method 'select', which CommitPol"):
        Decoder(policy=Nothing())
    with pytest.raises(ValueError, match="rewards: Unnamed has no attribute 'name', which Reward"):
        checked_component(Unnamed(), Reward, option="rewards")


def test_double_uids_name_both_rows():
    one = PromptExample(uid="a/test/1", task="a", text="x")
    other = replace(one, uid="a/test/2")
    check_uids({"a": [one, other], "b": [replace(one, uid="b/test/1", task="b")]})
    with pytest.raises(ValueError, match="got 'a/test/1' for row 0 of task 'a' and row 2 of task"):
        check_uids({"a": [one, other, one]})
    with pytest.raises(ValueError, match="for row 0 of task 'a' and row 0 of task 'b'"):
        check_uids({"a": [one], "b": [replace(one, task="b")]})
    with pytest.raises(ValueError, match="expected task 'b', got 'a' in row 0 of task 'b'"):
        check_uids({"b": [one]})
