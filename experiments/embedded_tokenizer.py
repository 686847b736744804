"""The tokenizer of the embedded models, a byte-level BPE over pieces of the generated texts.

Digits are single tokens, words keep the spaces around them, a newline includes its indentation, a
function header is one token: prompts have at most 28 tokens, completions 32 with their end. Writes
the files of ``tiny`` and ``tiny-planning``; ``picture_model_files.py`` writes those of the picture
model.
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from lit_dlm.toy import PythonFunctions, WordProblems
from lit_dlm.toy.generated import TrainingSource
from lit_dlm.toy.pictures import PICTURE_MARKS

PAD, END, MASK = "<|pad|>", "<|endoftext|>", "<|mask|>"
USER, ASSISTANT = "<|user|>", "<|assistant|>"

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


def _texts(sources: Sequence[TrainingSource]) -> Iterator[str]:
    rng = random.Random("vocabulary/0")
    for index in range(_NUM_PAIRS):
        for text in sources[index % len(sources)].draw_pair(rng):
            # Marks are added whole: as text their letters would become merges.
            yield re.sub(r"<\|\w+\|>", "", text)


def main() -> None:
    """Writes the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    tokenizer = build_tokenizer([WordProblems("train"), PythonFunctions("train")])
    tokenizer.save_pretrained(str(parser.parse_args().folder))


if __name__ == "__main__":
    main()
