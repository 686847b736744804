"""Records decodes of loops that are not part of this project.

:class:`TraceRecorder` works with any loop: it is shown the canvas before the first step and after
every step, or told what every step wrote. :func:`record_generate` does this for a plain
``generate`` of Dream or LLaDA by watching the inputs of the model's forwards. :func:`foreign_run`
describes such records so that they can be stored, and re-executed if :func:`llada_decoder` or
:func:`dream_decoder` finds components that decide as the loop does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from lit_dlm.decoding import (
    BlockWindow,
    CommitPolicy,
    ConfidencePolicy,
    Decoder,
    DecodeSettings,
    EntropyPolicy,
    EvenQuota,
    MarginPolicy,
    Sampler,
    ScheduleQuota,
)
from lit_dlm.trajectories.capture import as_recorded
from lit_dlm.trajectories.record import Trajectory, derive, expect
from lit_dlm.trajectories.store.provenance import RunRecord


class TraceRecorder:
    """Records one decode at a time: :meth:`begin`, :meth:`step` after every step, :meth:`end`.

    A loop without a canvas calls :meth:`write` after every step. Whatever changes between two
    canvases is a write of the step between them, whether it commits, edits or re-masks. A row ends
    with the last step that found a mask in it or changed it.
    """

    def __init__(self, *, mask_id: int, vocab_size: int) -> None:
        self.mask_id, self.vocab_size = mask_id, vocab_size
        self._canvases: list[Tensor] = []

    def begin(
        self,
        ids: Tensor,
        *,
        start: int | None = None,
        length: int = 0,
        pad_mask: Tensor | None = None,
        seeds: Sequence[int] | None = None,
    ) -> None:
        """Takes the canvas before the first step; a decode that was not ended is discarded.

        Args:
            ids: ``(B, L)`` integer; left-padded prompts fill the columns before ``start``. From
                there on, tokens other than masks are given.
            start: first response column; by default all of ``ids`` are prompts.
            length: masks to add on the right, for a loop that has no canvas.
            pad_mask: ``(B, L)`` or ``(B, start)``, nonzero on real tokens (an attention mask).
            seeds: noise seed of each row, if the loop has one.
        """
        start = ids.shape[-1] if start is None else start
        ids = nn.functional.pad(ids, (0, length), value=self.mask_id)
        fits = ids.ndim == 2 and 0 < start < ids.shape[1]
        expect(
            fits and not bool((ids[:, :start] == self.mask_id).any()),
            "recorder: expected ids of shape (B, L), 0 < start < L and no mask id "
            f"({self.mask_id}) before start, got {tuple(ids.shape)} and start {start}",
        )
        self._start = start
        real = torch.ones_like(ids) if pad_mask is None else pad_mask
        self._real = real[:, :start].bool().cpu().numpy()
        self._seeds = [0] * len(ids) if seeds is None else list(seeds)
        self._canvases = [ids.detach().int().clone()]

    def step(self, ids: Tensor) -> None:
        """Takes the canvas ``(B, L)`` after a step; does not wait for the device."""
        expected = tuple(self._canvases[0].shape) if self._canvases else "a call of begin"
        expect(
            tuple(ids.shape) == expected,
            f"recorder: expected the whole canvas {expected} after every step, got "
            f"{tuple(ids.shape)}",
        )
        # A loop may go on writing to this tensor.
        self._canvases.append(ids.detach().int().clone())

    def write(self, positions: ArrayLike, tokens: ArrayLike) -> None:
        """Takes what a step wrote, from a loop that has no canvas to show.

        Args:
            positions: ``(B, n)`` columns of the canvas, from 0 for the first of the prompt; -1
                where a row has fewer than ``n``. Of a single row also ``(n,)``.
            tokens: their new ids; that of the mask takes a token back.
        """
        expect(self._canvases, "recorder: expected a call of begin before write")
        before = self._canvases[-1].cpu()
        B, L = before.shape
        columns, ids = (
            torch.atleast_2d(torch.as_tensor(one).long().cpu()) for one in (positions, tokens)
        )
        fits = columns.shape == ids.shape and len(ids) == B
        expect(
            fits and bool(((columns >= -1) & (columns < L)).all()),
            f"recorder: expected columns below {L} and their tokens, {B} rows of each, got "
            f"{columns.tolist()} and {ids.tolist()}",
        )
        # The column behind the last takes what fills up rows.
        after = torch.cat([before, before[:, :1]], dim=1)
        after.scatter_(1, columns % (L + 1), ids.int())
        self._canvases.append(after[:, :L].to(self._canvases[-1].device))

    def end(
        self, uids: Sequence[str], metas: Sequence[Mapping[str, Any]] | None = None
    ) -> list[Trajectory]:
        """Ends the decode and returns one record per row.

        ``metas`` are small JSON objects, such as ``{"method": "llada", "task": "gsm8k"}``.
        """
        assert self._canvases, "no decode has begun; call begin first"
        states = torch.stack(self._canvases).cpu().numpy()  # (T + 1, B, L)
        self._canvases = []
        start, mask_id = self._start, self.mask_id
        is_kept = (states[-1, :, :start] == states[0, :, :start]).all()
        expect(is_kept, f"recorder: the loop changed a prompt (columns before {start})")
        # A row is decoded until the last step that found a mask in it or changed it; a loop goes on
        # with the rows that are done while others are not.
        has_mask = (states[:, :, start:] == mask_id).any(2)
        is_open = has_mask[:-1] | (states[1:] != states[:-1]).any(2)
        rows = zip(uids, metas or [{} for _ in uids], self._seeds, strict=True)
        records = []
        for row, (uid, meta, seed) in enumerate(rows):
            num_steps = int(np.flatnonzero(is_open[:, row]).max(initial=-1)) + 1
            first, after = states[0, row, start:], states[1 : num_steps + 1, row, start:]
            prompt = states[0, row, :start][self._real[row]]
            records.append(
                Trajectory(
                    uid=uid,
                    prompt_ids=as_recorded(prompt, self.vocab_size),
                    vocab_size=self.vocab_size,
                    seed=seed % 2**64,
                    status="step_limit" if has_mask[-1, row] else "complete",
                    meta=dict(meta),
                    **derive(first, after, mask_id),
                )
            )
        return records


def record_generate(
    model: nn.Module,
    generate: Callable[[], Any],
    *,
    prompt_ids: Tensor,
    uids: Sequence[str],
    metas: Sequence[Mapping[str, Any]] | None = None,
    attention_mask: Tensor | None = None,
) -> tuple[Any, list[Trajectory]]:
    """Records a plain generate loop by watching the inputs of the model's forwards.

    Each forward's input shows what was committed since the previous one, and the loop's result
    shows the last step: ``model.diffusion_generate(...)`` of Dream and ``generate(model, ...)`` of
    LLaDA's repository both feed the whole canvas to every forward. With classifier-free guidance
    LLaDA's forwards hold every row twice; the first half is the canvas. A loop with a cache, whose
    forwards do not show the whole canvas, is refused; it must call :class:`TraceRecorder` itself.

    Args:
        model: the model that the loop calls.
        generate: runs the loop; returns the final canvas, or an object with ``sequences``, or a
            tuple that begins with one of them.
        prompt_ids: ``(B, P)`` left-padded prompts, with which the canvas begins.
        uids: one name per row.
        metas: a small JSON object per row.
        attention_mask: ``(B, P)`` nonzero on real tokens, if prompts are padded.

    Returns:
        What ``generate`` returned, and one record per row.
    """
    config = getattr(model, "config", None)
    vocab_size: Any = getattr(config, "vocab_size", None)
    mask_id: Any = getattr(config, "mask_token_id", None)
    name = type(model).__name__
    expect(
        mask_id is not None and vocab_size is not None,
        f"the configuration of {name} must name vocab_size and mask_token_id, got {vocab_size} "
        f"and {mask_id}; let the loop call TraceRecorder itself",
    )
    recorder = TraceRecorder(mask_id=mask_id, vocab_size=vocab_size)
    B, P = prompt_ids.shape
    num_forwards = 0

    # The input of a forward shows what the step before it wrote. The loop itself is not touched,
    # and its own hooks on tokens or logits stay free.
    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal num_forwards
        ids: Any = kwargs.get("input_ids", args[0] if args else None)
        try:
            fits = isinstance(ids, Tensor) and ids.ndim == 2 and len(ids) in (B, 2 * B)
            # With guidance the second half repeats the canvases without their prompts.
            if fits and num_forwards:
                recorder.step(ids[:B])
                return
            expect(
                fits and torch.equal(ids[:B, :P], prompt_ids.to(ids.device)),
                f"expected {B} rows (or twice as many) that begin with the {P} columns of "
                f"prompt_ids, got {ids}",
            )
            recorder.begin(ids[:B], start=P, pad_mask=attention_mask)
        except ValueError as error:
            raise ValueError(
                f"forward {num_forwards} of {name}: {error}; a loop with a cache shows its "
                "forwards a part of the canvas, so let it call TraceRecorder.step itself"
            ) from error
        finally:
            num_forwards += 1

    handle = model.register_forward_pre_hook(before, with_kwargs=True)
    try:
        result = generate()
    finally:
        handle.remove()
    expect(num_forwards, f"generate: it never called the forward of {name}")
    final: Any = result[0] if isinstance(result, tuple) else result
    recorder.step(getattr(final, "sequences", final))
    return result, recorder.end(uids, metas)


def foreign_run(method: str, decoder: Decoder | str) -> RunRecord:
    """Returns the run record for records of a foreign loop.

    Args:
        method: the value of ``meta["method"]`` in the records.
        decoder: components that decide as the loop does, for verification by re-execution; or the
            reason why there are none, which verification then reports.
    """
    described = {"undescribed": decoder} if isinstance(decoder, str) else decoder.describe()
    decode = {"methods": {method: described}}
    return RunRecord(model={}, tokenizer={}, decode=decode, randomness={}, data={})


def llada_decoder(
    *,
    steps: int,
    gen_length: int,
    block_length: int,
    temperature: float = 0.0,
    cfg_scale: float = 0.0,
    remasking: str = "low_confidence",
) -> Decoder | str:
    """Returns the decoder that decides as LLaDA's own ``generate`` does (arXiv 2502.09992).

    Arguments are those of that function. If there is no such decoder, the reason is returned.
    """
    if temperature > 0.0 or remasking == "random":
        return "it draws from torch's global generator, whose state no record holds"
    if cfg_scale > 0.0:
        return f"it combines two forwards (cfg_scale {cfg_scale}), which no sampler here does"
    if remasking != "low_confidence":
        return f"remasking {remasking!r} is unknown"
    # The release then divides a block's positions by more steps than there are.
    if steps > gen_length:
        return f"{steps} steps for {gen_length} tokens: some steps commit nothing in a full block"
    return Decoder(
        policy=ConfidencePolicy(),
        window=BlockWindow(block_length),
        quota=EvenQuota(steps),
        sampler=Sampler(score_dtype="float64"),  # in float32, sure tokens tie at exactly 1
    )


def dream_decoder(
    *,
    steps: int,
    alg: str = "origin",
    alg_temp: float | None = 0.0,
    temperature: float = 0.0,
    top_p: float | None = None,
    top_k: int | None = None,
    eps: float = 1e-3,
) -> Decoder | str:
    """Returns the decoder that decides as Dream's ``diffusion_generate`` does, without hooks.

    Arguments are those of its generation configuration. If there is no such decoder, the reason is
    returned.
    """
    policies: dict[str, CommitPolicy] = {
        "maskgit_plus": ConfidencePolicy(),
        "topk_margin": MarginPolicy(),
        "entropy": EntropyPolicy(),
    }
    if temperature > 0.0 or alg == "origin" or alg_temp:
        return "it draws from torch's global generator, whose state no record holds"
    if alg not in policies:
        return f"alg {alg!r} is unknown"
    return Decoder(
        policy=policies[alg],
        quota=ScheduleQuota(steps, eps),
        sampler=Sampler(top_p=top_p, top_k=top_k, score_on="filtered"),
        settings=DecodeSettings(stall_rule="idle", max_steps=steps),
    )
