"""Hand-made decode states, observers, and batches against their rows alone."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from lit_dlm.decoding import (
    Decoder,
    DecodeResult,
    DecodeState,
    Observer,
    StepRecord,
    decode,
    prompt_canvas,
)
from lit_dlm.decoding.api import DecodedRows, DecodePrompt, WorkQueue, decode_stream
from lit_dlm.decoding.state import QueueObserver
from lit_dlm.trajectories.capture import TrajectoryCapture
from lit_dlm.trajectories.record import Trajectory
from tests.fakes import EOS, MASK


def state_with_masks(
    masks: Sequence[Sequence[int]], num_blocks: int = 1, **of_rows: int
) -> DecodeState:
    """Two prompt columns, then one response column per entry; 1 = masked, 0 = token 5.

    The step and the counts of blocks are those of all rows.
    """
    response = torch.tensor(masks)
    b = len(masks)
    counts = {"step": 0, "block": 0, "block_step": 0, "block_masks": 0, **of_rows}
    prompt = torch.full((b, 2), 4)
    ids = torch.cat([prompt, torch.where(response == 1, MASK, 5)], dim=1)
    editable = torch.arange(ids.shape[1]).expand_as(ids) >= 2
    return DecodeState(
        ids=ids,
        editable=editable,
        masked=editable & (ids == MASK),
        positions=torch.arange(ids.shape[1]).expand_as(ids),
        rows=torch.arange(b),
        seeds=torch.arange(b) + 10,
        start=2,
        mask_id=MASK,
        eos_ids=torch.tensor([EOS]),
        pad_mask=None,
        written=torch.zeros_like(editable),
        kept_open=torch.zeros_like(editable),
        status=torch.zeros(b, dtype=torch.long),
        budget=torch.full((b,), 999),
        num_wrote=torch.zeros(b, dtype=torch.long),
        num_decided=torch.zeros(b, dtype=torch.long),
        num_blocks=num_blocks,
        **{name: torch.full((b,), count) for name, count in counts.items()},
    )


class Recorder:
    """Keeps every record; asks for nothing unless told to."""

    def __init__(self, *requires: str, hidden_layers: tuple[int, ...] = (-1,)) -> None:
        self.requires = frozenset(requires)
        self.hidden_layers = hidden_layers
        self.records: list[StepRecord] = []
        self.started: DecodeState | None = None
        self.result: DecodeResult | None = None

    def on_start(self, state: DecodeState) -> None:
        self.started = state

    def on_step(self, record: StepRecord) -> None:
        self.records.append(record)

    def on_refill(self, result: DecodeResult, state: DecodeState) -> None: ...

    def on_end(self, result: DecodeResult) -> None:
        self.result = result

    def commits(self, row: int = 0) -> list[list[int]]:
        """Columns that a row committed, step by step."""
        return [
            commit.nonzero()[:, 0].tolist()
            for record in self.records
            for commit in record.commit[record.state.rows == row]
        ]


def decoded(
    decoder: Decoder,
    backbone: Any,
    prompts: Sequence[Sequence[int]],
    length: int,
    *observers: Observer,
    seed: int = 0,
) -> DecodeResult:
    """Decodes one batch, whose rows have the seed and those that follow it."""
    canvas = prompt_canvas(
        prompts,
        response_length=length,
        spec=backbone.spec,
        seeds=range(seed, seed + len(prompts)),
        device=backbone.device,
    )
    return decode(backbone, decoder, canvas, observers)


def streamed(
    decoder: Decoder,
    backbone: Any,
    prompts: Sequence[list[int]],
    length: int,
    num_slots: int,
    *observers: QueueObserver,
    queue: WorkQueue | None = None,
) -> Iterator[DecodedRows]:
    """Decodes prompts in a batch of some rows, which are replaced as they end."""
    return decode_stream(
        backbone,
        decoder,
        queue or WorkQueue(len(prompts)),
        lambda number: DecodePrompt(str(number), prompts[number], 100 + number),
        response_length=length,
        batch_size=num_slots,
        observers=observers,
    )


class Arrivals(WorkQueue):
    """An open queue into which one prompt comes every other step; of some, nobody waits long."""

    is_open = True

    def __init__(self, size: int, num_slots: int, abandoned: Sequence[int] = ()) -> None:
        super().__init__(num_slots)
        self.num_prompts, self.gone = size, abandoned
        self.at_work: list[int] = []  # rows at each step
        self._steps = self._entered = 0

    def take(self, number: int) -> list[int]:
        self._steps += 1
        self.at_work.append(self.size - number)
        first = self._entered
        self._entered = max(min(1 + self._steps // 2, self.num_prompts, first + number), first)
        return list(range(first, self._entered))

    def abandoned(self) -> Sequence[int]:
        return self.gone if self._steps % 3 == 0 else ()

    @property
    def is_over(self) -> bool:
        return self._entered == self.num_prompts


def as_rows_alone(
    decoder: Decoder, backbone: Any, prompts: Sequence[list[int]], length: int, *watching: Observer
) -> DecodeResult:
    """Decodes a padded batch, whose rows must be those of one row at a time."""
    result = decoded(decoder, backbone, prompts, length, *watching, seed=11)
    for row, prompt in enumerate(prompts):
        alone = decoded(decoder, backbone, [prompt], length, seed=11 + row)
        assert torch.equal(alone.ids[0, -length:], result.ids[row, -length:])
        for name in ("num_steps", "idle_steps"):
            assert getattr(alone, name)[0] == getattr(result, name)[row]
    assert not (result.ids[:, -length:] == backbone.spec.mask_id).any()
    return result


class Everything(Recorder):
    """Keeps the whole numbers of every step of every row, by seed: scores depend on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: dict[int, list] = {}
        self.refills: list = []

    def on_step(self, record: StepRecord) -> None:
        state = record.state
        columns = (state.ids, state.masked, record.candidates, record.commit, record.new_ids)
        for row, seed in enumerate(state.seeds.tolist()):
            of_row = [int(part[row]) for part in (state.rows, state.step, state.block)]
            window = (state.window[row] - state.start).unique().tolist()
            cells = [part[row, state.start :].long().tolist() for part in columns]
            self.steps.setdefault(seed, []).append([*of_row, window, *cells])

    def on_refill(self, result: DecodeResult, state: DecodeState) -> None:
        self.refills.append([result.rows, state.rows.tolist(), result.num_forwards])


def everything(
    decoder: Decoder,
    backbone: Any,
    prompts: Sequence[list[int]],
    length: int,
    num_slots: int,
    *watching: QueueObserver,
    capture: TrajectoryCapture | None = None,
) -> tuple[dict[str, Any], list[Trajectory]]:
    """Steps, results, records and refills of all rows in whole numbers; and their records."""
    capture = capture or TrajectoryCapture(vocab_size=backbone.vocab_size, level="tokens")
    seen, results, records = Everything(), {}, {}
    counts = ("seeds", "num_steps", "idle_steps", "stalled_steps", "policy_forwards")
    watching = (seen, capture, *watching)
    for ended in streamed(decoder, backbone, prompts, length, num_slots, *watching):
        result = ended.result
        for row, number in enumerate(ended.numbers):
            results[number] = [
                *(int(getattr(result, name)[row]) for name in counts),
                result.ids[row, result.start - len(prompts[number]) :].tolist(),
                result.prefilled[row, result.start :].long().tolist(),
                result.status[row],
                result.rows[row],
                result.num_forwards,
            ]
        for record in capture.trajectories([str(number) for number in ended.numbers]):
            records[record.uid] = record
    numbers = {uid: [one.tokens.tolist(), one.commit_step.tolist()] for uid, one in records.items()}
    found = {"steps": seen.steps, "results": results, "records": numbers, "refills": seen.refills}
    return found, [*records.values()]
