from pathlib import Path

import pytest

from lit_dlm.backbones.tokenizer import load_tokenizer
from lit_dlm.reports.pieces import TokenPieces
from tests.reports.sample_sets import EOS, MASK, ids_of, tiny_pieces

DREAM = Path(__file__).resolve().parents[3] / "shared" / "data" / "tokenizers" / "dream"


def test_pieces_put_together_are_the_text():
    pieces = tiny_pieces()
    text = "8-4=4\nso 4-4=0\n#### 0"
    ids = ids_of(text)
    assert "".join(pieces.text(token) for token in ids) == text
    assert "".join(pieces.texts([*ids, EOS, EOS])) == text
    assert pieces.is_special(EOS)
    assert not pieces.is_special(ids[0])


def test_characters_of_several_tokens_are_joined_where_they_are_whole():
    """The euro sign is E2 82 AC. A byte-level vocabulary of single bytes has one token for each, so
    the four positions of "€x" are one group of three and an "x"."""
    pieces = tiny_pieces()
    ids = ids_of("€x")
    assert len(ids) == 4
    assert [pieces.text(token) for token in ids] == ["⟨E2⟩", "⟨82⟩", "⟨AC⟩", "x"]
    assert pieces.joined(ids) == [(0, 3, "€")]
    assert pieces.joined(ids[:2]) == []
    assert "".join(pieces.texts(ids)) == "€x"
    # A part that nothing completes does not swallow the whole character behind it.
    assert pieces.joined([ids[0], *ids]) == [(1, 3, "€")]
    assert "".join(pieces.texts([ids[1], *ids])) == "⟨82⟩€x"
    assert pieces.joined([ids[0], MASK, ids[1]]) == []


def test_without_a_tokenizer_and_beyond_the_vocabulary_ids_are_shown():
    assert TokenPieces(None).text(7) == " 7"
    assert tiny_pieces().text(10**6) == " 1000000"
    assert "".join(TokenPieces(None).texts([7, 8])) == " 7 8"


@pytest.mark.slow
@pytest.mark.skipif(not DREAM.is_dir(), reason="the shared tokenizers are not here")
def test_pieces_of_a_released_tokenizer_are_its_decoding():
    tokenizer = load_tokenizer(str(DREAM))
    pieces = TokenPieces(tokenizer)
    text = "Größe 数学 🙂👍🏽 \u202eabc\u202c </script>\n\tπ≈3.14"
    ids = tokenizer(text)["input_ids"]
    assert "".join(pieces.texts(ids)) == text == tokenizer.decode(ids)
    partial = [token for token in ids if pieces.is_partial(token)]
    assert partial, "the text has characters of several tokens"
    assert all(pieces.text(token).startswith("⟨") for token in partial)
