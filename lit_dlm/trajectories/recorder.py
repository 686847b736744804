"""Records of decode loops that are not ours.

:class:`TraceRecorder` is the way in for any loop: it is shown the canvas before the first step and
after every step. :func:`record_generate` does so for a plain ``generate`` of Dream or LLaDA by
watching the inputs of the model's forwards, and :func:`foreign_run` describes such records, so that
they can be stored, and executed again where :func:`llada_decoder` or :func:`dream_decoder` finds
the plugs that decide as the loop does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lit_dlm.backbones.families import FAMILIES
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
from lit_dlm.ops.options import within
from lit_dlm.trajectories.capture import (
    CapturedDecode,
    CapturedRow,
    HostCopies,
    StartingRows,
    StepBuffer,
    append_top,
    top_buffers,
)
from lit_dlm.trajectories.record import Trajectory
from lit_dlm.trajectories.store.provenance import RunRecord, hardware_facts


class TraceRecorder:
    """Records one decode at a time: :meth:`begin`, :meth:`step` after every step, :meth:`end`.

    Whatever changes between two canvases is a write of the step between them, whether it commits,
    edits or masks again. A row's steps end with the last one that found a mask in it or changed it.
    """

    def __init__(
        self, *, mask_id: int, vocab_size: int, top_k: int = 0, step_times: bool = False
    ) -> None:
        """Sets what is recorded.

        Args:
            mask_id: id of the mask token.
            vocab_size: bound of the token ids.
            top_k: most probable tokens to keep of every masked position; needs logits.
            step_times: keep the time from one call to the next as the duration of the step.

        Raises:
            ValueError: ``top_k`` is out of range.
        """
        within(f"[0, {vocab_size}]", top_k=top_k)
        self.mask_id, self.vocab_size = mask_id, vocab_size
        self.top_k, self.step_times = top_k, step_times
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

        Raises:
            ValueError: the shapes do not fit, or a prompt holds a mask.
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
        self._top = top_buffers(B, L - start, self.top_k, self._copies)
        self._step_seconds: list[float] = []
        self._clock = time.perf_counter()

    def step(self, ids: Tensor, *, logits: Tensor | None = None) -> None:
        """Takes the canvas after a step; does not wait for the device.

        Args:
            ids: ``(B, L)`` integer; may be written afterwards.
            logits: ``(B, L, V)`` of the step's forward, row ``i`` predicting column ``i`` (undo the
                shift of models that predict the next column); needed with ``top_k`` and only there.

        Raises:
            ValueError: no decode has begun, a shape differs, or logits are missing.
        """
        before = self._begun()
        if ids.shape != before.shape:
            raise ValueError(
                f"recorder: expected the whole canvas {tuple(before.shape)} after every step, got "
                f"{tuple(ids.shape)}"
            )
        if self.step_times:
            self._step_seconds.append(time.perf_counter() - self._clock)
        number = self._canvas.length + 1
        ids = ids.detach().clone()
        is_open = (before[:, self._start :] == self.mask_id).any(1) | (ids != before).any(1)
        self._num_steps = torch.where(is_open, number, self._num_steps)
        self._canvas.append(self._rows, ids)
        self._ids = ids
        if self.top_k:
            if logits is None:
                raise ValueError(f"recorder: top_k {self.top_k} needs the logits of every step")
            response = torch.arange(ids.shape[1] - self._start, device=ids.device)
            columns = response.expand(len(ids), -1)
            shown = logits[:, self._start :].detach()
            append_top(self._top, self._rows, shown, columns, self.top_k)
        self._clock = time.perf_counter()

    def end(
        self, uids: Sequence[str], metas: Sequence[Mapping[str, Any]] | None = None
    ) -> list[Trajectory]:
        """Ends the decode.

        Args:
            uids: one name per row.
            metas: small JSON values per row, such as ``{"method": "llada", "task": "gsm8k"}``.

        Returns:
            One record per row.

        Raises:
            ValueError: no decode has begun, a prompt was changed, or the numbers do not fit.
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
                    start=starting,
                    number=row,
                    place=row,
                    first_step=0,
                    num_steps=num_steps,
                    status="step_limit" if is_open else "complete",
                )
                for row, (num_steps, is_open) in enumerate(
                    zip(self._num_steps.tolist(), left.tolist(), strict=True)
                )
            ],
            canvases=self._canvas.parts(),
            mask_id=self.mask_id,
            vocab_size=self.vocab_size,
            signals={name: buffer.parts() for name, buffer in self._top.items()},
            step_seconds=self._step_seconds,
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
    shift: int | None = None,
    top_k: int = 0,
    step_times: bool = False,
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
        mask_id: id of the mask token; that of the model's configuration or family by default.
        shift: 1 where row ``i`` of the logits predicts column ``i + 1`` (Dream), else 0; by default
            that of the model's family. Only ``top_k`` reads it.
        top_k: most probable tokens to keep of every masked position of every step.
        step_times: keep the duration of every step.

    Returns:
        What ``generate`` returned, and one record per row.

    Raises:
        ValueError: the mask id is unknown, or a forward does not show the whole canvas, as in loops
            with a cache; such a loop calls :class:`TraceRecorder` itself.
    """
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    family = next((f for f in FAMILIES.values() if kind in f.model_types), None)
    if mask_id is None:
        mask_id = getattr(config, "mask_token_id", None) or (family.ids.mask if family else None)
    if mask_id is None:
        raise ValueError(
            f"mask_id: the configuration of {type(model).__name__} names none; give it"
        )
    if shift is None:
        shift = family.shift if family else 0
    (B, P), vocab_size = prompt_ids.shape, getattr(config, "vocab_size", None)
    if vocab_size is None:
        raise ValueError(f"the configuration of {type(model).__name__} names no vocab_size")
    recorder = TraceRecorder(
        mask_id=mask_id, vocab_size=vocab_size, top_k=top_k, step_times=step_times
    )
    # The input of a forward shows what the step before it wrote; the loop itself is not touched.
    num_forwards = 0
    logits: Tensor | None = None

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
                recorder.step(ids, logits=logits)
            except ValueError as error:
                raise ValueError(
                    f"{where}: {error}; a loop with a cache shows its forwards a part of the "
                    "canvas, so let it call TraceRecorder.step itself"
                ) from error
        num_forwards += 1

    def after(_module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        nonlocal logits
        if top_k:
            logits = output.logits[:B]
            if shift:
                logits = torch.cat([logits[:, :1], logits[:, :-1]], dim=1)

    handles = [
        model.register_forward_pre_hook(before, with_kwargs=True),
        model.register_forward_hook(after, with_kwargs=True),
    ]
    try:
        result = generate()
    finally:
        for handle in handles:
            handle.remove()
    if num_forwards == 0:
        raise ValueError(f"generate: it never called the forward of {type(model).__name__}")
    final: Any = result[0] if isinstance(result, tuple) else result
    final = getattr(final, "sequences", final)
    recorder.step(final, logits=logits)
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

    Arguments are those of that function.

    Returns:
        The decoder, or the reason why the loop cannot be described as one.
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

    Arguments are those of its generation configuration.

    Returns:
        The decoder, or the reason why the loop cannot be described as one.
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
