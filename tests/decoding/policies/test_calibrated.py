import json
import math
from collections import Counter
from pathlib import Path

import pytest
import torch

from lit_dlm.backbones import load_tokenizer
from lit_dlm.backbones.location import ASSETS
from lit_dlm.decoding import PCSamplerPolicy, Proposal
from lit_dlm.toy.python_functions import PythonFunctions
from lit_dlm.toy.word_problems import WordProblems
from tests.decoding.states import state_with_masks

COUNTS = {"num_token": 1000, "p_baseline_dict": {"3": 500, "5": 20}}


@pytest.fixture
def counts(tmp_path: Path) -> Path:
    path = tmp_path / "counts.json"
    path.write_text(json.dumps(COUNTS))
    return path


def slow_order(ids: list[int], prob: list[float], decay: float, clip: float) -> list[int]:
    """Cells by the paper's score; an id without a count has the frequency 1/1000."""
    frequency = {3: 0.5, 5: 0.02}
    scores = [
        math.exp(-decay * cell) * min(-p * math.log(frequency.get(token, 0.001)), clip)
        for cell, (token, p) in enumerate(zip(ids, prob, strict=True))
    ]
    return sorted(range(len(ids)), key=lambda cell: -scores[cell])


@pytest.mark.parametrize("decay", [0.0, 0.25, 2.0])
@pytest.mark.parametrize("clip", [0.5, 10.0])
def test_rare_tokens_come_first_and_those_on_the_left(counts: Path, decay: float, clip: float):
    """Each quota commits the best cells of the paper's order; 9 and 77 have no counts."""
    ids, prob = [3, 5, 9, 3, 77, 5], [0.95, 0.6, 0.05, 0.99, 0.3, 0.9]
    order = slow_order(ids, prob, decay, clip)
    state = state_with_masks([[1] * 6])
    proposal = Proposal(ids=torch.tensor([[4, 4, *ids]]), prob=torch.tensor([[0.0, 0.0, *prob]]))
    policy = PCSamplerPolicy(counts, decay=decay, clip=clip)
    for quota in range(7):
        commit = policy.select(state, state.masked, proposal, torch.tensor([quota])).commit
        assert (commit[0].nonzero()[:, 0] - 2).tolist() == sorted(order[:quota])


def test_far_cells_keep_their_order(counts: Path):
    """exp(-0.5 * 2000) is 0 in float64."""
    state = state_with_masks([[1] * 2001])
    prob = torch.full(state.ids.shape, 0.5)
    scores = PCSamplerPolicy(counts, decay=0.5).score(state, Proposal(ids=state.ids, prob=prob))
    assert (scores[0, 2:].diff() < 0).all()


def test_the_description_names_the_file_and_another_one_is_refused(counts: Path, tmp_path: Path):
    described = PCSamplerPolicy(counts).describe()
    assert PCSamplerPolicy(**described).describe() == described
    counts.write_text(json.dumps({**COUNTS, "num_token": 1001}))
    with pytest.raises(ValueError, match=f"background: {counts} has sha256"):
        PCSamplerPolicy(**described).describe()
    for content in ("{}", "[1]", '{"num_token": 1, "p_baseline_dict": {"a": 1}}', "x"):
        counts.write_text(content)
        with pytest.raises(ValueError, match="background: expected a JSON file with num_token"):
            PCSamplerPolicy(counts).describe()
    with pytest.raises(ValueError, match=r"background: .*missing\.json"):
        PCSamplerPolicy(tmp_path / "missing.json").describe()


def test_the_embedded_models_counts_are_those_of_its_training_answers():
    """2,000 of each task, an end of text behind each."""
    tokenizer, found = load_tokenizer("tiny"), Counter()
    for task in (WordProblems, PythonFunctions):
        chosen = task(split="train", num_examples=2000)
        for example in chosen.examples():
            answer = chosen.reference_completion(example)
            found.update([*tokenizer.encode(answer, add_special_tokens=False), 1])
    stored = json.loads((ASSETS / "tiny" / "token_counts.json").read_bytes())
    wanted = {str(token): count for token, count in found.items()}
    assert stored == {"num_token": found.total(), "p_baseline_dict": wanted}
