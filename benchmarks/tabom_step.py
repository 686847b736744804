"""Memory and time of TABOM's loss step, against the same step on full logits.

One step is cross-entropy and entropy ranking of the supervised rows of a batch and their gradient
with respect to the hidden states; the head is frozen, as under LoRA. Ours scores the rows with
``lit_dlm.tensors.fused_head``. The full-logits form computes logits and ``log_softmax`` of the
whole batch, as the release does, and leaves the rest to autograd; it needs about 8 GB at the
default sizes. A second baseline selects the supervised rows first and then does the same with them;
the ratios to it show the gain of the chunked head alone (``rows_memory_ratio``,
``rows_time_ratio``).

All forms run in this process in turns. Memory is the growth of the peak resident set over the step.
Ratios are medians of ours over medians of the baseline's: below 1 is in our favour.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial

import measurement
import torch
from torch import Tensor

from lit_dlm.finetuning.tabom import entropy_ranking
from lit_dlm.tensors.fused_head import token_stats


def main() -> None:
    """Runs all forms in turns."""
    options = measurement.options(
        __doc__,
        rows=(512, "supervised rows in all"),
        batch=8,
        length=(512, "canvas columns"),
        vocab=152_064,
        width=(512, "of the hidden states"),
        dtype="float32",
        repeats=3,
    )
    data = _Step(options)
    forms: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
        "ours": data.fused,
        "full": data.full_logits,
        "rows": partial(data.full_logits, rows_first=True),
    }
    loss, gradient = data.fused()
    wanted_loss, wanted = data.full_logits(rows_first=True)
    memory: dict[str, list[float]] = {name: [] for name in forms}
    seconds = measurement.in_turns(forms, options.repeats)
    for _ in range(options.repeats):
        for name, form in forms.items():
            measurement.trim()
            before = measurement.reset_peak()
            form()
            memory[name].append(measurement.peak() - before)
    peak = {name: statistics.median(values) / 2**20 for name, values in memory.items()}
    report = {
        "memory_ratio": peak["ours"] / peak["full"],
        "time_ratio": seconds["ours"] / seconds["full"],
        "rows_memory_ratio": peak["ours"] / peak["rows"],
        "rows_time_ratio": seconds["ours"] / seconds["rows"],
        **{f"{name}_seconds": value for name, value in seconds.items()},
        **{f"{name}_megabytes": value for name, value in peak.items()},
        "loss_difference": abs(float(loss) - float(wanted_loss)),
        "gradient_difference": float((gradient - wanted).abs().max() / wanted.abs().max()),
    }
    measurement.tell(report, as_json=options.json)


class _Step:
    """One batch and the forms of its loss step."""

    def __init__(self, options: argparse.Namespace) -> None:
        B, L = options.batch, options.length
        per_row, left = divmod(options.rows, B)
        if left or not 2 <= per_row <= L:
            raise SystemExit(f"--rows: expected a multiple of {B} from {2 * B} to {B * L}")
        generator = torch.Generator().manual_seed(0)
        dtype = getattr(torch, options.dtype)
        self.hidden = torch.randn(B, L, options.width, generator=generator).to(dtype)
        self.weight = (torch.randn(options.vocab, options.width, generator=generator) * 0.1).to(
            dtype
        )
        self.targets = torch.randint(options.vocab, (B, L), generator=generator)
        self.steps = torch.rand(B, L, generator=generator).argsort(1)
        self.cut = torch.full((B,), L // 4)
        self.window = per_row
        self.supervised = (self.steps >= L // 4) & (self.steps < L // 4 + per_row)

    def fused(self) -> tuple[Tensor, Tensor]:
        """Our step: rows first, then the chunked head."""
        hidden = self.hidden.clone().requires_grad_()
        stats = token_stats(hidden[self.supervised], self.weight, self.targets[self.supervised])
        return self._finish(hidden, stats.ce, stats.entropy)

    def full_logits(self, *, rows_first: bool = False) -> tuple[Tensor, Tensor]:
        """The step on full logits, in float32, of all columns or of the supervised rows."""
        hidden = self.hidden.clone().requires_grad_()
        rows = hidden[self.supervised] if rows_first else hidden.flatten(0, 1)
        log_probs = (rows.float() @ self.weight.float().T).log_softmax(-1)
        if not rows_first:
            log_probs = log_probs[self.supervised.flatten()]
        ce = -log_probs.gather(1, self.targets[self.supervised][:, None]).squeeze(1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        return self._finish(hidden, ce, entropy)

    def _finish(self, hidden: Tensor, ce: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the sum of both losses, and the gradient of the hidden states."""
        spread = entropy.new_zeros(self.supervised.shape)
        spread = spread.masked_scatter(self.supervised, entropy)
        ranking = entropy_ranking(
            spread, self.steps, self.supervised, self.cut, window=self.window, margin=0.1
        )
        has_pairs = ranking.num_pairs > 0
        loss = ce.mean() + ranking.row_terms.sum() / has_pairs.sum()
        loss.backward()
        assert hidden.grad is not None
        return loss.detach(), hidden.grad.float()


if __name__ == "__main__":
    main()
