"""Records of decode loops that are not ours.

:class:`TraceRecorder` is the way in for any loop: it is shown the canvas before the first step and
after every step. :func:`record_generate` does so for a plain ``generate`` of Dream or LLaDA by
watching the inputs of the model's forwards, and :func:`foreign_run` describes such records, so that
they can be stored, and executed again where :func:`llada_decoder` or :func:`dream_decoder` finds
the plugs that decide as the loop does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
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
from lit_dlm.trajectories.capture import (
    CapturedDecode,
    CapturedRow,
    HostCopies,
    StartingRows,
    StepBuffer,
)
from lit_dlm.trajectories.record import Trajectory
from lit_dlm.trajectories.store.provenance import RunRecord, hardware_facts


class TraceRecorder:
    """Records one decode at a time: :meth:`begin`, :meth:`step` after every step, :meth:`end`.

    Whatever changes between two canvases is a write of the step between them, whether it commits,
    edits or masks again. A row's steps end with the last one that found a mask in it or changed it.
    """

    def __init__(self, *, mask_id: int, vocab_size: int) -> None:
        self.mask_id, self.vocab_size = mask_id, vocab_size
        self._ids: Tensor | None = None

    def begin(
        self,
        ids: Tensor,
        *,
        start: int,
        pad_mask: Tensor | None = None,
        seeds: Sequence[int] | None = None,
    ) -> None:
        """Takes the canvas before the first step; a decode that was not ended is forgotten.

        Args:
            ids: ``(B, L)`` integer; prompts end, left-padded, before column ``start``. Other tokens
                than masks behind it are given.
            start: first response column.
            pad_mask: ``(B, L)`` or ``(B, start)``, nonzero on real tokens (an attention mask).
            seeds: noise seed of each row, where the loop has one.
        """
        if ids.ndim != 2 or not 0 < start < ids.shape[1]:
            raise ValueError(
                f"recorder: expected ids of shape (B, L) and 0 < start < L, got {tuple(ids.shape)} "
                f"and start {start}"
            )
        B, L = ids.shape
        if seeds is not None and len(seeds) != B:
            raise ValueError(f"recorder: expected {B} seeds, got {len(seeds)}")
        if bool((ids[:, :start] == self.mask_id).any()):
            raise ValueError(
                f"recorder: a prompt (columns before {start}) holds the mask id {self.mask_id}"
            )
        self._start, self._first = start, ids.detach().clone()
        self._ids = self._first
        self._pad_mask = None if pad_mask is None else pad_mask[:, :start].bool().to(ids.device)
        self._seeds = torch.tensor(list(seeds) if seeds is not None else [0] * B)
        self._rows = torch.arange(B, device=ids.device)
        self._num_steps = torch.zeros(B, dtype=torch.long, device=ids.device)
        self._copies = HostCopies(ids.device)
        self._canvas = StepBuffer(B, L - start, torch.int32, self._copies, expected_steps=L - start)

    def step(self, ids: Tensor) -> None:
        """Takes the canvas ``(B, L)`` after a step; does not wait for the device."""
        before = self._begun()
        if ids.shape != before.shape:
            raise ValueError(
                f"recorder: expected the whole canvas {tuple(before.shape)} after every step, got "
                f"{tuple(ids.shape)}"
            )
        number = self._canvas.length + 1
        ids = ids.detach().clone()
        is_open = (before[:, self._start :] == self.mask_id).any(1) | (ids != before).any(1)
        self._num_steps = torch.where(is_open, number, self._num_steps)
        self._canvas.append(self._rows, ids)
        self._ids = ids

    def end(
        self, uids: Sequence[str], metas: Sequence[Mapping[str, Any]] | None = None
    ) -> list[Trajectory]:
        """Ends the decode; gives one record per row.

        Args:
            uids: one name per row.
            metas: small JSON values per row, such as ``{"method": "llada", "task": "gsm8k"}``.
        """
        ids, start = self._begun(), self._start
        if not torch.equal(ids[:, :start], self._first[:, :start]):
            raise ValueError(f"recorder: the loop changed a prompt (columns before {start})")
        left = (ids[:, start:] == self.mask_id).any(1)
        starting = StartingRows.of(
            self._first, start, pad_mask=self._pad_mask, seeds=self._seeds, copies=self._copies
        )
        captured = CapturedDecode(
            copies=self._copies,
            rows=[
                CapturedRow(
                    starting, row, row, 0, num_steps, "step_limit" if is_open else "complete"
                )
                for row, (num_steps, is_open) in enumerate(
                    zip(self._num_steps.tolist(), left.tolist(), strict=True)
                )
            ],
            canvases=self._canvas.parts(),
            mask_id=self.mask_id,
            vocab_size=self.vocab_size,
        )
        self._ids = None
        return captured.trajectories(uids, metas)

    def _begun(self) -> Tensor:
        """The last canvas."""
        if self._ids is None:
            raise ValueError("recorder: no decode has begun; call begin first")
        return self._ids


def record_generate(
    model: nn.Module,
    generate: Callable[[], Any],
    *,
    prompt_ids: Tensor,
    uids: Sequence[str],
    metas: Sequence[Mapping[str, Any]] | None = None,
    attention_mask: Tensor | None = None,
    mask_id: int | None = None,
) -> tuple[Any, list[Trajectory]]:
    """Records a plain generate loop by watching the inputs of the model's forwards.

    Each forward's input shows what was committed since the last one, and what the loop returns
    shows the last step: ``model.diffusion_generate(...)`` of Dream and the ``generate(model, ...)``
    of LLaDA's repository both feed the whole canvas to every forward. With classifier-free guidance
    LLaDA's forwards hold every row twice; the first half is the canvas.

    Args:
        model: the model that the loop calls.
        generate: runs the loop; returns the final canvas, or an object with ``sequences``, or a
            tuple that begins with one of them.
        prompt_ids: ``(B, P)`` left-padded prompts, which begin the canvas.
        uids: one name per row.
        metas: small JSON values per row.
        attention_mask: ``(B, P)`` nonzero on real tokens, where prompts are padded.
        mask_id: id of the mask token; that of the model's configuration by default.

    Returns:
        What ``generate`` returned, and one record per row.

    A loop with a cache, whose forwards do not show the whole canvas, is refused; it calls
    :class:`TraceRecorder` itself.
    """
    config = getattr(model, "config", None)
    if mask_id is None:
        mask_id = getattr(config, "mask_token_id", None)
    if mask_id is None:
        raise ValueError(
            f"mask_id: the configuration of {type(model).__name__} names none; give it"
        )
    (B, P), vocab_size = prompt_ids.shape, getattr(config, "vocab_size", None)
    if vocab_size is None:
        raise ValueError(f"the configuration of {type(model).__name__} names no vocab_size")
    recorder = TraceRecorder(mask_id=mask_id, vocab_size=vocab_size)
    # The input of a forward shows what the step before it wrote; the loop itself is not touched.
    num_forwards = 0

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal num_forwards
        ids = kwargs.get("input_ids", args[0] if args else None)
        where = f"forward {num_forwards} of {type(model).__name__}"
        if not isinstance(ids, Tensor) or ids.ndim != 2 or len(ids) not in (B, 2 * B):
            raise ValueError(
                f"{where}: expected input ids of {B} rows (or twice as many), got {ids}"
            )
        ids = ids[:B]
        if num_forwards == 0:
            if ids.shape[1] <= P or not torch.equal(ids[:, :P], prompt_ids.to(ids.device)):
                raise ValueError(
                    f"{where}: expected a canvas that begins with the {P} columns of prompt_ids, "
                    f"got {tuple(ids.shape)}"
                )
            recorder.begin(ids, start=P, pad_mask=attention_mask)
        else:
            try:
                recorder.step(ids)
            except ValueError as error:
                raise ValueError(
                    f"{where}: {error}; a loop with a cache shows its forwards a part of the "
                    "canvas, so let it call TraceRecorder.step itself"
                ) from error
        num_forwards += 1

    handle = model.register_forward_pre_hook(before, with_kwargs=True)
    try:
        result = generate()
    finally:
        handle.remove()
    if num_forwards == 0:
        raise ValueError(f"generate: it never called the forward of {type(model).__name__}")
    final: Any = result[0] if isinstance(result, tuple) else result
    final = getattr(final, "sequences", final)
    recorder.step(final)
    return result, recorder.end(uids, metas)


def foreign_run(
    method: str,
    decoder: Decoder | str,
    *,
    model: Mapping[str, Any] | None = None,
    tokenizer: Mapping[str, Any] | None = None,
    data: Mapping[str, Any] | None = None,
    batch_size: int | None = None,
) -> RunRecord:
    """The run record of records from a foreign loop.

    Args:
        method: what ``meta["method"]`` of the records says.
        decoder: plugs that decide as the loop does, for verification by re-execution; or the reason
            why there are none, which verification then gives.
        model: facts such as ``HFBackbone.describe()`` returns; verification compares them.
        tokenizer: ``path``, ``digest`` and special ids.
        data: where the prompts are from.
        batch_size: rows of a batch, so that verification can form the same ones.
    """
    described = {"undescribed": decoder} if isinstance(decoder, str) else decoder.describe()
    return RunRecord(
        model=model or {},
        tokenizer=tokenizer or {},
        decode={"methods": {method: described}},
        randomness={},
        data=data or {},
        hardware={**hardware_facts(), "batch_size": batch_size},
    )


def llada_decoder(
    *,
    steps: int,
    gen_length: int,
    block_length: int,
    temperature: float = 0.0,
    cfg_scale: float = 0.0,
    remasking: str = "low_confidence",
) -> Decoder | str:
    """The decoder that decides as the ``generate`` of LLaDA's repository (arXiv 2502.09992) does.

    Arguments are those of that function. A reason stands for a loop that has no such decoder.
    """
    if temperature > 0.0 or remasking == "random":
        return "it draws from torch's global generator, whose state no record holds"
    if cfg_scale > 0.0:
        return f"it combines two forwards (cfg_scale {cfg_scale}), which no sampler here does"
    if remasking != "low_confidence":
        return f"remasking {remasking!r} is unknown"
    if steps > gen_length:
        return f"{steps} steps for {gen_length} cells: some steps commit nothing in a full block"
    return Decoder(
        policy=ConfidencePolicy(),
        window=BlockWindow(block_length),
        quota=EvenQuota(steps),
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
    """The decoder that decides as Dream's ``diffusion_generate`` does, without hooks.

    Arguments are those of its generation configuration. A reason stands for a loop that has no such
    decoder.
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
