"""Process rewards: chunks, opinions, comparison and the tokens they end on."""

import numpy as np
import pytest

from lit_dlm.rewards import ProcessReward, Rollout
from lit_dlm.rewards.judge import Grade, Judge, StepQuestion
from tests.rewards.groups import Table, right, wrong

BAD: list[Grade | None] = [-1, -1, -1]


def tokens(reward: ProcessReward, *group: Rollout) -> list[list[float]]:
    return [score.token_rewards.tolist() for score in reward.score(group)]


def test_numbers_stand_on_the_last_written_tokens_of_the_final_block_and_of_the_response():
    """Chunks of 4, blocks of 2 behind a prompt of 2, 7 tokens: chunks end at 4 and 7.

    Grades of chunk 0: 1 and -1, so numbers 1 and -1. Its final block is cells 2 and 3: in the first
    response cell 2 is written last (step 3), in the second both at step 1. Chunk 1 ends the
    response: the last step of all is 6 at cell 5, and 4 at cells 0 and 6. Grades -1, 1.
    """
    group = [
        right(number=0, steps=[0, 1, 3, 2, 4, 6, 5]),
        wrong(number=1, steps=[4, 0, 1, 1, 2, 3, 4]),
    ]
    reward = ProcessReward(Table(r1p0=BAD, r0p1=BAD), reward_chunk_length=4, block_size=2)
    assert tokens(reward, *group) == [[0, 0, 1, 0, 0, -1, 0], [1, 0, -1, -1, 0, 0, 1]]
    assert [(s.parts["process"], s.total) for s in reward.score(group)] == [(0.0, 0.0)] * 2


def test_blocks_that_begin_with_the_sequence_are_shifted_by_the_prompt():
    """Prompt of 3, blocks of 4: the response's blocks are cell 0, cells 1 to 4, cells 5 to 8.

    Chunks of 3 end at cells 3, 6, 9. The final block of the first is cells 1 to 4, in which cell 4
    was written last, after the chunk's own end; that of the second is cells 5 to 8, cut at the
    response's 8 tokens: cell 7. The third ends the response: cell 7 as well. Grades 1 and -1 in
    each chunk give numbers 1 and -1, and those on cell 7 add up.
    """
    shape = {"steps": range(9), "num_prompt": 3, "num_tokens": 8}
    judge = Table(r1p0=BAD, r1p1=BAD, r1p2=BAD)
    reward = ProcessReward(judge, reward_chunk_length=3, block_size=4)
    expected = [0, 0, 0, 0, 1, 0, 0, 2, 0]
    group = right(number=0, **shape), wrong(number=1, **shape)
    assert tokens(reward, *group) == [expected, [-x for x in expected]]


def test_without_blocks_every_chunk_is_its_own_final_block():
    """The last chunk, too: cell 0 was written last of all in the first response."""
    group = [right(number=0, steps=[3, 0, 1, 2]), wrong(number=1, steps=[0, 1, 2, 3])]
    reward = ProcessReward(Table(r1p0=BAD, r0p1=BAD), reward_chunk_length=2)
    assert tokens(reward, *group) == [[1, 0, 0, -1], [0, -1, 0, 1]]


@pytest.mark.parametrize("opinions", [[1, -1, 1], [1, None, 1], [None, None, None]])
def test_opinions_that_do_not_agree_fall_back_to_the_outcome(opinions: list[Grade | None]):
    judge = Table(r0p0=opinions, r1p0=opinions)
    scores = ProcessReward(judge).score([right(number=0), wrong(number=1)])
    found = [(s.parts["process"], s.parts["process_agreement"]) for s in scores]
    assert found == [(1.0, 0.0), (-1.0, 0.0)]


def test_chunks_are_compared_only_with_chunks_of_the_same_number():
    """Chunk 0 of three responses: 1, 1, -1 with mean 1/3 and deviation sqrt(8)/3: numbers
    1/sqrt(2), 1/sqrt(2) and -sqrt(2). Only the first has a chunk 1, whose grade stays -1."""
    group = [right(number=0), right(number=1, num_tokens=2), wrong(number=2, num_tokens=2)]
    found = tokens(ProcessReward(Table(r2p0=BAD, r0p1=BAD), reward_chunk_length=2), *group)
    root = 2**0.5
    expected = [[0, 1 / root, -1], [0, 1 / root, 0], [0, -root, 0]]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_the_judge_sees_the_text_up_to_the_end_of_each_chunk_and_nothing_of_an_empty_one():
    judge = Table()
    reward = ProcessReward(judge, reward_chunk_length=2, k_sample=1)
    assert tokens(reward, wrong(num_tokens=0), wrong(number=1)) == [[0, 0, 0], [0, 1, 1]]
    assert sorted(q.shown for q in judge.questions) == ["0 1", "0 1 2"]
    question = judge.questions[0]
    assert (question.problem, question.truth, question.response) == ("3+4?", "7", "8")
    assert not question.is_correct


def test_a_failing_judge_stops_the_rest():
    class Failing(Judge):
        def grade(self, question: StepQuestion, sample: int) -> Grade | None:
            raise ValueError(f"{question.uid}: did not answer")

    with pytest.raises(ValueError, match="sums/train/0#0: did not answer"):
        ProcessReward(Failing()).score([right()])
