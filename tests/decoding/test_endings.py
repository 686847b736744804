import pytest
import torch

from lit_dlm.decoding import (
    ConfidencePolicy,
    Decoder,
    DecodeSettings,
    Region,
    TemplateLayout,
    prompt_canvas,
)
from lit_dlm.decoding.stream import text_cells
from tests.fakes import EOS, TableBackbone, logits_for

SPLIT = TemplateLayout([Region(name="R", length=2), Region(name="A", marker=[7])])


def test_a_text_ends_before_its_first_end():
    response = torch.tensor([[5, 6, EOS, 7], [5, 6, 7, 8], [EOS, 5, EOS, 5]])
    assert text_cells(response, [EOS]).int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]


def test_given_cells_begin_a_part_of_their_own():
    """The marker stands in cell 3; a given end of text ends nothing."""
    response = torch.tensor([[5, EOS, 6, 7, 8, EOS, 9], [5, 6, 6, EOS, 8, 9, EOS]])
    given = torch.zeros(2, 7, dtype=torch.bool)
    given[:, 3] = True
    assert text_cells(response, [EOS], given).int().tolist() == [
        [1, 0, 0, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 1, 0],
    ]


def test_the_answer_behind_a_marker_is_kept_when_the_reasoning_ends_early():
    backbone = TableBackbone(logits_for([4, 5, EOS, 7, 6, EOS], [0.5, 0.9, 0.9, 0.9, 0.9, 0.9], 9))
    canvas = prompt_canvas([[4]], response_length=5, spec=backbone.spec, seeds=[0])
    result = Decoder(policy=ConfidencePolicy(), layout=SPLIT)(backbone, canvas)
    assert result.given is not None
    assert result.given.int().tolist() == [[1, 0, 0, 1, 0, 0]]
    cells = text_cells(result.ids[:, 1:], [EOS], result.given[:, 1:])
    assert result.ids[:, 1:][cells].tolist() == [5, 7, 6]
    assert Decoder(policy=ConfidencePolicy())(backbone, canvas).given is None


def test_an_end_of_text_may_not_fill_the_regions_behind_a_marker():
    with pytest.raises(ValueError, match="eos_rule: expected 'none' with TemplateLayout, where an"):
        Decoder(policy=ConfidencePolicy(), layout=SPLIT, settings=DecodeSettings(eos_rule="fill"))
