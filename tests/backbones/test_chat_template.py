"""Chat templates: those of strangers give the same texts as in transformers, but within limits."""

import base64
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lit_dlm.backbones import chat_template, load_tokenizer
from lit_dlm.backbones.chat_template import apply_chat_template
from lit_dlm.backbones.location import ASSETS
from lit_dlm.generation import generate
from lit_dlm.predict.decode import encoded_turns
from lit_dlm.tasks.base import shipped_templates
from lit_dlm.trajectories.tools.exchange import tabom_row
from tests.trajectories.samples import small_record

# They are rendered in another process.
pytestmark = pytest.mark.slow
SYSTEM = {"role": "system", "content": "Be brief. \r\n"}
USER = {"role": "user", "content": "What is 2 + 3? \u00e9 {{ 1 }}\0", "name": None}
TURNS = [SYSTEM, USER, {"role": "assistant", "content": "Five "}]
UNENDED = "did not end within 2 s and 1 GiB"
TAGGED = """
{% for message in messages -%}
    {% if message.name is defined %}{{ raise_exception("no names") }}{% endif %}
    {{ bos_token }}{{ message.role }}{% generation %}{{ message.content }}{% endgeneration %}
    {{- {"a": message.content} | tojson }}{% if loop.last %}{% break %}{% endif %}
{% endfor %}{% if add_generation_prompt %}{{ eos_token }}{% endif %}
"""


@pytest.fixture
def tokenizer() -> Any:
    return load_tokenizer("tiny")


@pytest.mark.parametrize("name", ["own", "tagged", *shipped_templates("chat")])
def test_a_template_gives_what_it_gives_in_transformers(tokenizer: Any, name: str) -> None:
    if name != "own":
        tokenizer.chat_template = {"tagged": TAGGED, **shipped_templates("chat")}[name]
    for turns, options in (
        (TURNS[:2], {"add_generation_prompt": True, "return_dict": False}),
        (TURNS, {"tokenize": False}),
        (TURNS, {"tokenize": False, "continue_final_message": True}),
    ):
        given: Any = options
        made = apply_chat_template(tokenizer, turns, **given)
        assert made == tokenizer.apply_chat_template(turns, **given)


def test_a_template_of_an_embedded_model_needs_no_other_process(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "SECONDS", 0.0)
    assert "2 + 3" in apply_chat_template(tokenizer, TURNS, tokenize=False)
    tokenizer.chat_template += " "
    with pytest.raises(ValueError, match="did not end within 0 s"):
        apply_chat_template(tokenizer, TURNS, tokenize=False)


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", UNENDED),
        ("{{ 'a'.ljust(2 * 10**9) }}", UNENDED),
        ("{% set n = namespace(x='ab') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}"
         "{% endfor %}{{ n.x }}", UNENDED),
        ("{{ 'a'.ljust(40 * 10**6) }}", "more than 32 Mi characters"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ 1 // 0 }}", "by zero"),
        ("{{ [].a.b }}", "has no attribute 'a'"),
        ("{% if %}", "Expected an expression"),
    ],
)  # fmt: skip
def test_a_hostile_template_is_one_line_and_the_next_works(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, template: str, problem: str
) -> None:
    """The doublings would reach two terabytes."""
    monkeypatch.setattr(chat_template, "SECONDS", 2.0)
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=rf"tiny: the chat template cannot be used: .*{problem}"):
        apply_chat_template(tokenizer, TURNS, tokenize=False)
    monkeypatch.setattr(chat_template, "SECONDS", 60.0)
    tokenizer.chat_template = "{{ messages[1].content }}"
    assert apply_chat_template(tokenizer, TURNS, tokenize=False) == USER["content"]


@pytest.mark.parametrize(
    "ask",
    [
        lambda tokenizer: encoded_turns(tokenizer, [USER], backbone=None, uid="a"),
        lambda tokenizer: generate("tiny", ["a"], tokenizer=tokenizer),
        lambda tokenizer: tabom_row(small_record([1], [0]), tokenizer),
    ],
)
def test_everybody_asks_within_the_limits(tokenizer: Any, ask: Callable[[Any], Any]) -> None:
    tokenizer.chat_template = "{{ raise_exception('asked') }}"
    with pytest.raises(ValueError, match="cannot be used: asked"):
        ask(tokenizer)


def _replace(old: str, new: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: old}, "content": new}


def _precompiled(text: bytes) -> dict[str, Any]:
    """A table is the size of its index, here empty, and texts."""
    table = base64.b64encode(bytes(4) + b"x\0" + text + b"\0").decode()
    return {"type": "Precompiled", "precompiled_charsmap": table}


DOUBLE, MARK = _replace("a", "aa"), "\u2581"
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
CTC = {"type": "CTC", "pad_token": "z", "word_delimiter_token": "", "cleanup": True}
METASPACE = {"type": "Metaspace", "replacement": MARK, "prepend_scheme": "always", "split": True}


@pytest.mark.parametrize(
    ("normalizers", "pretokenizers", "decoders", "growth"),
    [
        ([DOUBLE] * 9, [], [], None),
        ([DOUBLE] * 10, [], [], "1.02e+03"),
        ([DOUBLE] * 5, [BYTES] * 5, [], "1.02e+03"),
        ([], [BYTES] * 30, [], "1.07e+09"),
        ([], [], [DOUBLE] * 30, "1.07e+09"),
        ([_replace("", "b" * 300, "Regex")], [], [], "601"),
        ([_replace("a", "\u00e9" * 300)], [], [], "600"),
        ([{"type": "Prepend", "prepend": "b" * 300}], [], [], "601"),
        ([_precompiled(b"b" * 1800)], [], [], "600"),
        ([{"type": "NFKC"}] * 3, [], [], "1.33e+03"),
        ([], [], [{"type": "BPEDecoder", "suffix": ""}] * 6, "729"),
        ([], [], [CTC] * 20, "3.49e+09"),
        # As in Llama's and T5's.
        ([{"type": "Prepend", "prepend": MARK}, _replace(" ", MARK)], [], [], None),
        ([], [], [_replace(MARK, " ")], None),
        ([{"type": "NFKC"}, _replace(" {2,}", MARK, "Regex")], [METASPACE], [], None),
    ],
)  # fmt: skip
def test_a_tokenizer_does_not_make_long_texts_of_short_ones(
    tmp_path: Path, normalizers: Any, pretokenizers: Any, decoders: Any, growth: str | None
) -> None:
    """Ten doublings are 1,024 times; bytes double where a character is not ASCII."""
    path = tmp_path / "tokenizer.json"
    described = json.loads((ASSETS / "tiny" / "tokenizer.json").read_text())
    described["normalizer"] = {"type": "Sequence", "normalizers": normalizers}
    described["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": pretokenizers}
    described["decoder"] = {"type": "Sequence", "decoders": decoders}
    path.write_text(json.dumps(described))
    if growth is None:
        assert load_tokenizer(str(tmp_path)).encode("b")
    else:
        with pytest.raises(
            ValueError, match=rf"{path}: .* at most 512 .*, got {re.escape(growth)} "
        ):
            load_tokenizer(str(tmp_path))


def test_a_tokenizer_is_the_file_that_was_looked_at_and_frames_a_text_with_few_tokens(
    tmp_path: Path,
) -> None:
    described = json.loads((ASSETS / "tiny" / "tokenizer.json").read_text())
    path, strange = tmp_path / "tokenizer.json", {**described, "normalizer": _replace("3", "4" * 9)}
    path.write_text(json.dumps(described))
    (tmp_path / "tokenizer.4.0.json").write_text(json.dumps(strange))
    named = {"fast_tokenizer_files": ["tokenizer.4.0.json"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    assert load_tokenizer(str(tmp_path)).encode("3") == load_tokenizer("tiny").encode("3")
    piece = {"SpecialToken": {"id": "X", "type_id": 0}}
    described["post_processor"] = {
        "type": "TemplateProcessing",
        "pair": [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"],
        "special_tokens": {"X": {"id": "X", "ids": [5] * 30, "tokens": ["X"] * 30}},
    }
    for single, growth in (([piece] * 30, 902), (described["post_processor"]["pair"] * 300, 602)):
        described["post_processor"]["single"] = single
        path.write_text(json.dumps(described))
        with pytest.raises(ValueError, match=rf"at most 512 .*, got {growth} \(post_processor\)"):
            load_tokenizer(str(tmp_path))
