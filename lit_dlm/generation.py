"""Decoding in one call, from Python: prompts in, texts out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from rich import get_console
from rich.progress import track

from lit_dlm.backbones import Backbone, load_backbone, tokenizer_of
from lit_dlm.backbones.chat_template import apply_chat_template
from lit_dlm.decoding import ConfidencePolicy, Decoder, Observer
from lit_dlm.decoding.api import DecodePrompt, Detokenizer, WorkQueue, decode_stream, length_buckets
from lit_dlm.tensors.precision import evaluating
from lit_dlm.tensors.sampling import sample_seed
from lit_dlm.trajectories.capture import TrajectoryCapture
from lit_dlm.trajectories.record import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lit_dlm.reports.notebook import Shown

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""A user's text, token ids that are used as they are, or messages with ``role`` and ``content``."""


@dataclass
class Generations:
    """Responses in the order of the prompts."""

    # Response tokens, cut before the first end of text (with a template, in every part of it);
    # masks that were left are dropped
    ids: list[list[int]]
    num_steps: list[int]  # forwards of the backbone that the row took part in
    status: list[str]  # complete, eos or step_limit
    texts: list[str] = field(default_factory=list)  # decoded ids; empty without a tokenizer
    trajectories: list[Trajectory] = field(default_factory=list)  # filled on demand
    decoder: dict[str, Any] = field(default_factory=dict)
    tokenizer: PreTrainedTokenizerBase | None = field(default=None, repr=False)

    def show(self) -> Shown:
        """Returns the decodes step by step, for the output of a notebook."""
        if not self.trajectories:
            raise ValueError("show: expected decodes of generate(..., trajectories=True), got none")
        from lit_dlm.reports.notebook import show_records

        return show_records(self.trajectories, self.tokenizer, self.decoder)


def generate(
    backbone: Backbone | str,
    prompts: Sequence[Prompt],
    *,
    decode: Decoder | None = None,
    tokenizer: PreTrainedTokenizerBase | str | None = None,
    response_length: int = 128,
    batch_size: int = 16,
    seed: int = 0,
    uids: Sequence[str] | None = None,
    trajectories: bool = False,
    observers: Sequence[Observer] = (),
    progress: bool = True,
) -> Generations:
    """Decodes prompts in batches of similar length; no response depends on the batches.

    Args:
        backbone: the denoiser, or a name, folder or hub id to load one from.
        prompts: texts and messages go through the tokenizer's chat template, token ids do not.
        decode: the decoder; one token per step by confidence by default. Without a window, it works
            on the whole response, or block after block with a block model.
        tokenizer: the tokenizer, or a name, folder or hub id; by default that of ``backbone``, if
            this is a string. Not needed for token ids.
        response_length: cells to fill.
        batch_size: most prompts in a batch.
        seed: base seed; a sample's own seed follows from it and its uid.
        uids: names of the prompts and of their records; by default their numbers.
        trajectories: whether to record every decode.
        observers: read-only callbacks, started anew for every batch. If one ends the decode of a
            batch, only the responses that have ended are returned.
        progress: whether a terminal or a notebook shows how far it is, with more than ten prompts.
    """
    if isinstance(prompts, str) or not prompts or not all(prompts):
        raise ValueError("prompts: expected a list of prompts, none of them empty")
    if isinstance(backbone, str):
        tokenizer = backbone if tokenizer is None else tokenizer
        backbone = load_backbone(backbone)
    if isinstance(tokenizer, str):
        tokenizer = tokenizer_of(backbone, tokenizer)
    decoder = (decode or Decoder(policy=ConfidencePolicy())).on(backbone.spec)
    if tokenizer is not None:
        encode = tokenizer
        decoder = decoder.encoded(lambda text: encode(text, add_special_tokens=False)["input_ids"])
    # A sample's noise follows from its name: with uids, responses do not depend on the order.
    names = list(map(str, range(len(prompts)))) if uids is None else uids
    encoded = [
        DecodePrompt(uid, token_ids(number, prompt, tokenizer), sample_seed(seed, uid))
        for number, (uid, prompt) in enumerate(zip(names, prompts, strict=True))
    ]
    done = Generations([], [], [], decoder=decoder.describe(), tokenizer=tokenizer)
    captures = [TrajectoryCapture(vocab_size=backbone.vocab_size)] if trajectories else []
    order: list[int] = []
    # Prompts of similar lengths together: a batch is as wide as its longest one.
    buckets = length_buckets([len(prompt.ids) for prompt in encoded], batch_size=batch_size)
    for rows in _tracked(buckets, progress=progress):
        with evaluating(backbone):
            stream = decode_stream(
                backbone,
                decoder,
                WorkQueue(len(rows)),
                [encoded[row] for row in rows].__getitem__,
                response_length=response_length,
                batch_size=len(rows),
                detokenizer=Detokenizer(backbone, tokenizer),
                observers=[*captures, *observers],
            )
            for batch in stream:  # one, or none if an observer has ended the decode
                ended = [rows[number] for number in batch.numbers]
                order += ended
                done.ids += batch.responses.ids
                done.num_steps += batch.result.num_steps.tolist()
                done.status += batch.result.status
                done.texts += batch.responses.texts
                for capture in captures:
                    done.trajectories += capture.trajectories([names[row] for row in ended])
    return _in_order(done, order)


def _tracked(buckets: list[list[int]], *, progress: bool) -> Iterable[list[int]]:
    """Yields buckets; of many prompts, a terminal or a notebook shows how far it is."""
    console, count = get_console(), sum(map(len, buckets))
    is_seen = progress and count > 10 and (console.is_terminal or console.is_jupyter)
    title = f"{count} prompts"
    return track(buckets, title, console=console, transient=True, disable=not is_seen)


def _in_order(done: Generations, order: list[int]) -> Generations:
    """Returns the responses in the order of their prompts; ``order`` has the prompt of each."""
    places = sorted(range(len(order)), key=order.__getitem__)
    lists: dict[str, Any] = {
        name: [values[place] for place in places]
        for name in ("ids", "num_steps", "status", "texts", "trajectories")
        if (values := getattr(done, name))  # no texts without a tokenizer
    }
    return replace(done, **lists)


def token_ids(number: int, prompt: Prompt, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    """Returns a prompt as the model receives it; errors name it by its number."""
    if not isinstance(prompt, str) and isinstance(prompt[0], int):
        return [int(cast(int, token)) for token in prompt]
    if tokenizer is None:
        raise ValueError(
            f"tokenizer: prompt {number} is text, so one is needed (or give token ids)"
        )
    is_text = isinstance(prompt, str)
    messages: Any = [{"role": "user", "content": prompt}] if is_text else list(prompt)
    options = {"add_generation_prompt": True, "return_dict": False}
    return list(apply_chat_template(tokenizer, messages, **options))
