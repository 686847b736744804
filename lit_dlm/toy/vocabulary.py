"""The tokenizer of the embedded models, a byte-level BPE over pieces of the generated texts.

Digits are single tokens, words keep the spaces around them, a newline includes its indentation, a
function header is one token: prompts have at most 28 tokens, completions 32 with their end.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from lit_dlm.backbones.location import ASSETS
from lit_dlm.toy.generated import TrainingSource
from lit_dlm.toy.word_problems import ITEMS, NAMES

PAD, END, MASK = "<|pad|>", "<|endoftext|>", "<|mask|>"
USER, ASSISTANT = "<|user|>", "<|assistant|>"
PICTURE_MARKS = ("<|mmu|>", "<|soi|>", "<|eoi|>")
"""Marks, as in MMaDA: a question about pictures follows; a picture begins; a picture ends."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}<|user|>{{ message['content'] }}"
    "{% elif message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}<|endoftext|>"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

# Pictures go before the turn, where TokenVision puts them.
PICTURE_CHAT_TEMPLATE = CHAT_TEMPLATE.replace(
    "<|user|>{{ message['content'] }}",
    "{% set parts = message['content'].rpartition('<|eoi|>') %}"
    "{{ parts[0] ~ parts[1] }}<|user|>{{ parts[2] }}",
)

_PIECES = (
    r"def f\([a-z,]+\):"  # a function header
    r"|\n#### |\n *"  # the answer line; a newline with its indentation
    r"|[0-9]"
    r"|(?<![A-Za-z_])[a-z](?![A-Za-z_])"  # one-letter variables never take a space
    r"| ?[A-Za-z_]+ ?"
    r"| ?[^\sA-Za-z0-9_]+ ?"
    r"|\s"
)


_NUM_PAIRS = 6_000


def build_tokenizer(
    sources: Sequence[TrainingSource], *, num_picture_tokens: int = 0
) -> PreTrainedTokenizerFast:
    """Builds the tokenizer of the embedded models. Equal arguments give equal files.

    ``sources`` are tasks whose texts define the vocabulary, in equal shares; the marks of pictures
    and ``num_picture_tokens``, ``<|p0|>`` and so on, come after all others.
    """
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    # Bytes, so that any text has tokens and comes back, though merges know the drawn texts alone.
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4_096,  # far above what the closed set of pieces needs: merging ends by itself
        min_frequency=2,
        show_progress=False,
        # In this order, for their ids are in the configurations of the shipped models.
        special_tokens=[PAD, END, MASK, USER, ASSISTANT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    core.train_from_iterator(_texts(sources), trainer=trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        mask_token=MASK,
        additional_special_tokens=[USER, ASSISTANT],
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    if num_picture_tokens:
        codes = [f"<|p{code}|>" for code in range(num_picture_tokens)]
        tokenizer.add_tokens([*PICTURE_MARKS, *codes], special_tokens=True)
        tokenizer.chat_template = PICTURE_CHAT_TEMPLATE
    return tokenizer


def unknown_words_hint(tokenizer: PreTrainedTokenizerBase, text: str) -> str | None:
    """Says what ``tiny`` is if a prompt has words that it never saw; ``None`` for other models."""
    if Path(tokenizer.name_or_path) != ASSETS / "tiny":
        return None
    known = {token.strip("Ġ") for token in tokenizer.get_vocab()}  # Ġ stands for a space
    # Words that it saw are whole tokens; others fall into letters, which it knows as variables.
    words = [word for word in re.findall(r"[^\W\d_]{2,}", text) if word not in known]
    if not words:
        return None
    return (
        f"tiny never saw {', '.join(map(repr, words[:5]))}: it is a toy of half a million "
        "parameters that knows small Python functions and sums told as stories, with "
        f"{len(NAMES)} names ({', '.join(NAMES)}) and {len(ITEMS)} things ({', '.join(ITEMS)}); "
        "with --response_length 32 it answers 'Tom has 34 pens, finds 7, loses 5. How many pens?'"
    )


def _texts(sources: Sequence[TrainingSource]) -> Iterator[str]:
    rng = random.Random("vocabulary/0")
    for index in range(_NUM_PAIRS):
        for text in sources[index % len(sources)].draw_pair(rng):
            # Marks are added whole: as text their letters would become merges.
            yield re.sub(r"<\|\w+\|>", "", text)
