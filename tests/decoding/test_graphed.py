"""Steps as graphs, emulated on a CPU: ragged rows get what the eager loop gives them."""

import gc
import logging
from dataclasses import replace
from weakref import WeakSet, ref

import pytest
import torch

import lit_dlm.decoding as d
from lit_dlm.decoding import BlockWindow
from lit_dlm.decoding.batch import Batch
from tests.decoding.cases import CASES
from tests.decoding.models import SPARSE, in_blocks, tiny_backbone
from tests.decoding.states import streamed
from tests.decoding.test_carry import MORE, PROMPTS, everything_of
from tests.graphs import EmulatedGraph, HostReadError, emulated

RAGGED = {**CASES, **MORE}


def both(monkeypatch, run):
    """What a run returns on the eager loop and with graphs, which it must have replayed."""
    with emulated(monkeypatch, is_on=False):
        expected = run()
    assert not EmulatedGraph.made
    with emulated(monkeypatch):
        found = run()
    assert any(graph.num_replays for graph in EmulatedGraph.made)
    return expected, found


@pytest.mark.parametrize("case", RAGGED)
def test_rows_get_what_the_eager_loop_gives_them(case, monkeypatch):
    expected, found = both(monkeypatch, lambda: everything_of(case))
    assert found == expected


def tokens(decoder, backbone=None):
    """Responses and steps of every prompt."""
    rows = {}
    for ended in streamed(decoder, backbone or tiny_backbone(), PROMPTS, 12, 5):
        result = ended.result
        for row, number in enumerate(ended.numbers):
            rows[number] = (result.ids[row, result.start :].tolist(), int(result.num_steps[row]))
    return rows


@pytest.mark.parametrize(
    ("changes", "cache"),
    [(SPARSE, None), ({**in_blocks("sequence"), **SPARSE}, d.BlockCache())],
)
def test_experts_are_routed_inside_of_a_graph(changes, cache, monkeypatch):
    quota, window = d.NoQuota(), BlockWindow(4, origin="sequence")
    decoder = d.Decoder(policy=d.ThresholdPolicy(0.15), window=window, quota=quota, cache=cache)
    expected, found = both(monkeypatch, lambda: tokens(decoder, tiny_backbone(**changes)))
    assert found == expected
    assert len(found) == len(PROMPTS)


class OnHost(d.ThresholdPolicy):
    """A user's policy that asks for a number and does not say that it may not be recorded."""

    graph_safe = False

    def select(self, state, candidates, proposal, quota):
        least = 0.14 if float(proposal.prob.max()) > 0.16 else 0.12
        return replace(
            super().select(state, candidates, proposal, quota),
            commit=candidates & (proposal.prob > least),
        )


class Careless(OnHost):
    """One that says that it may."""

    graph_safe = True


def test_a_policy_that_reads_runs_beside_the_graph_of_the_forward(monkeypatch, caplog):
    decoder = d.Decoder(
        policy=OnHost(), window=BlockWindow(4), quota=d.NoQuota(), cache=d.DualCache()
    )
    expected, found = both(monkeypatch, lambda: tokens(decoder))
    assert found == expected
    assert not caplog.records


def test_a_policy_that_reads_where_it_says_it_does_not_is_named(monkeypatch, caplog):
    decoder = d.Decoder(policy=Careless(), window=BlockWindow(4), quota=d.NoQuota())
    with emulated(monkeypatch, is_on=False):
        expected = tokens(decoder)
    with emulated(monkeypatch), caplog.at_level(logging.WARNING):
        assert tokens(decoder) == expected
    (line,) = caplog.messages
    assert line.startswith("Careless, BlockWindow, NoQuota: no CUDA graph, so steps run eagerly")
    assert "_local_scalar_dense" in line


def test_nothing_is_lost_where_memory_runs_out_at_a_recording(monkeypatch, caplog):
    decoder = d.Decoder(policy=d.ThresholdPolicy(0.15), quota=d.NoQuota())
    with emulated(monkeypatch, is_on=False):
        expected = tokens(decoder)

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    with emulated(monkeypatch), caplog.at_level(logging.WARNING):
        monkeypatch.setattr(EmulatedGraph, "record", full)
        assert tokens(decoder) == expected
    assert "CUDA out of memory" in caplog.text


def test_no_graph_outlives_its_decode(monkeypatch):
    decoder = d.Decoder(
        policy=d.ThresholdPolicy(0.15),
        quota=d.NoQuota(),
        cache=d.DualCache(),
        window=BlockWindow(4),
    )
    alive = []
    begin = Batch.__init__

    def watched(self, *args):
        begin(self, *args)
        alive.extend((ref(self), ref(self._forwards)))

    monkeypatch.setattr(Batch, "__init__", watched)
    gc.collect()
    gc.disable()
    try:
        with emulated(monkeypatch):
            tokens(decoder)
            graphs = [ref(graph) for graph in EmulatedGraph.made]
            EmulatedGraph.made.clear()
            assert graphs
            assert [one() for one in (*alive, *graphs)] == [None] * len((*alive, *graphs))
    finally:
        gc.enable()


def test_the_emulator_refuses_what_a_graph_cannot_hold():
    cells = torch.arange(4)
    for call in (
        lambda: cells.sum().item(),
        lambda: cells.nonzero(),
        lambda: cells[cells > 2],
        lambda: torch.tensor(3) + cells,
    ):
        with pytest.raises(HostReadError):
            EmulatedGraph(WeakSet()).record(call)


def test_the_emulator_replays_on_what_is_in_memory_now():
    memory = torch.tensor([1.0, 2.0])

    def call():
        doubled = memory * 2
        memory.add_(1.0)
        return doubled

    graph = EmulatedGraph(WeakSet())
    doubled = graph.record(call)
    assert memory.tolist() == [1.0, 2.0]  # recording runs nothing
    for step in range(3):
        graph.replay()
        assert doubled.tolist() == [2.0 + 2 * step, 4.0 + 2 * step]
    assert memory.tolist() == [4.0, 5.0]
