"""Steps as graphs, emulated on a CPU: ragged rows get what the eager loop gives them."""

import gc
import logging
from dataclasses import replace
from weakref import ref

import pytest
import torch

import lit_dlm.decoding as d
from lit_dlm.decoding import BlockWindow
from lit_dlm.decoding.batch import Batch
from lit_dlm.decoding.graphed import GraphedBatch
from lit_dlm.tracelock.policy import TraceLockPolicy
from lit_dlm.trajectories.capture import FeatureCapture, KeptSteps, TrajectoryCapture
from tests.decoding.cases import CASES, FULL
from tests.decoding.models import SPARSE, in_blocks, scorer, tiny_backbone
from tests.decoding.ragged import MORE, PROMPTS, everything_of
from tests.decoding.states import Arrivals, Recorder, everything, streamed
from tests.graphs import EmulatedGraph, FreedMemoryError, HostReadError, emulated

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


SURE = {"policy": d.ThresholdPolicy(0.5), "quota": d.NoQuota()}
KINDS = {
    "whole": ({"shift": 1}, SURE),
    "dual": ({"shift": 1}, {**SURE, "window": BlockWindow(4), "cache": d.DualCache()}),
    "blocks": (
        in_blocks("sequence"),
        {**SURE, "window": BlockWindow(4, origin="sequence"), "cache": d.BlockCache()},
    ),
}
LATE = [[7, 8], [9], [7, 8], [9], [7, 8], [9], [*range(5, 45)], [9], [7, 8], [7, 8]]
ROWS = {
    "one token": ([[5 + row] for row in range(7)], 3),
    "a long one late": (LATE, 2),
    "more slots than prompts": (PROMPTS[:6], 9),
    "equal": ([[5, 6, 7, 8, 9]] * 5 + [[8, 7, 6, 5, 9]] * 4, 3),
    "shrinking": ([*PROMPTS[:8], *PROMPTS[:1]], 8),
}


@pytest.mark.slow
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", KINDS)
def test_two_decodes_of_unlike_rows(kind, rows, monkeypatch):
    """Some rows end at an end of text, which is a token that the model likes to write."""
    changes, parts = KINDS[kind]
    decoder = d.Decoder(**parts, settings=d.DecodeSettings(eos_rule="stop"))
    backbone = tiny_backbone(**changes, eos_ids=(33, 79, 73, 70))
    prompts, num_slots = ROWS[rows]

    def run():
        return [everything(decoder, backbone, prompts, 20, num_slots)[0] for _ in range(2)]

    expected, found = both(monkeypatch, run)
    assert found == expected
    assert found[0] == found[1]
    assert "eos" in {status for *_, status, _, _ in found[0]["results"].values()}


def test_a_batch_moves_to_half_of_its_slots(monkeypatch):
    sizes = []
    drop = Batch.drop

    def watched(self, ended):
        drop(self, ended)
        sizes.append(len(self.rows))

    decoder = d.Decoder(**{**FULL, "window": BlockWindow(4), "cache": d.DualCache()})
    backbone = tiny_backbone()
    with emulated(monkeypatch, is_on=False):
        expected = everything(decoder, backbone, PROMPTS, 12, 8)
    with emulated(monkeypatch):
        monkeypatch.setattr(Batch, "drop", watched)
        assert everything(decoder, backbone, PROMPTS, 12, 8)[0] == expected[0]
    assert sizes[0] <= 4


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_enter_while_others_decode(kind, monkeypatch):
    """The batch doubles, frozen rows are taken over, and one row is given up."""
    changes, parts = KINDS[kind]
    decoder, backbone = d.Decoder(**parts), tiny_backbone(**changes)

    def run():
        queue, found = Arrivals(len(PROMPTS), 6, abandoned=[3]), {}
        while not queue.is_over:
            for ended in streamed(decoder, backbone, PROMPTS, 12, 6, queue=queue):
                result = ended.result
                for row, number in enumerate(ended.numbers):
                    steps = int(result.num_steps[row])
                    found[number] = (result.ids[row, result.start :].tolist(), steps)
        return found

    expected, found = both(monkeypatch, run)
    assert found == expected
    whole = tokens(decoder, backbone)
    assert found.keys() == whole.keys()
    assert {number for number in found if found[number] != whole[number]} <= {3}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_with_nothing_to_fill_among_others(kind, monkeypatch):
    changes, parts = KINDS[kind]
    decoder, backbone = d.Decoder(**parts), tiny_backbone(**changes)

    def run():
        numbers = iter(range(9))

        def source(num_slots):
            taken = [number for number, _ in zip(numbers, range(num_slots), strict=False)]
            if not taken:
                return None
            prompts = [PROMPTS[number] for number in taken]
            spec = backbone.spec
            canvas = d.prompt_canvas(prompts, response_length=12, spec=spec, seeds=taken)
            ids = canvas.ids.clone()
            for row, number in enumerate(taken):
                if number % 3 == 0:
                    ids[row, canvas.start :] = 11
            return replace(canvas, ids=ids)

        rows = {}
        for result in d.decode_queue(backbone, decoder, source, num_slots=4):
            for row, seed in enumerate(result.seeds.tolist()):
                rows[seed] = (result.ids[row, -12:].tolist(), int(result.num_steps[row]))
        return rows

    expected, found = both(monkeypatch, run)
    assert found == expected
    assert [seed for seed, (_, steps) in sorted(found.items()) if not steps] == [0, 3, 6]


@pytest.mark.parametrize("kind", KINDS)
def test_templates_whose_markers_fill_a_block(kind, monkeypatch):
    changes, parts = KINDS[kind]
    regions = [d.Region(name="R", length=4, marker="<r>"), d.Region(name="A", marker="<answer>")]
    layout = d.TemplateLayout(regions).encoded(lambda text: [5 + ord(one) % 80 for one in text])
    decoder, backbone = d.Decoder(**parts, layout=layout), tiny_backbone(**changes)
    expected, found = both(monkeypatch, lambda: everything(decoder, backbone, PROMPTS, 20, 4)[0])
    assert found == expected


class Tiring(d.ThresholdPolicy):
    """Asks for less in each step of a row; does not say what a row begins with."""

    graph_safe = True

    def select(self, state, candidates, proposal, quota):
        before = torch.zeros(len(state.ids), 1) if state.memory is None else state.memory
        commit = candidates & (proposal.prob >= self.threshold - 0.1 * before)
        return replace(
            super().select(state, candidates, proposal, quota), commit=commit, memory=before + 1
        )


@pytest.mark.parametrize("kind", KINDS)
def test_a_memory_that_begins_with_a_step(kind, monkeypatch):
    changes, parts = KINDS[kind]
    decoder = d.Decoder(**{**parts, "policy": Tiring(0.6)})
    backbone = tiny_backbone(**changes)
    expected, found = both(monkeypatch, lambda: everything(decoder, backbone, PROMPTS, 12, 5)[0])
    assert found == expected


@pytest.mark.parametrize("kind", KINDS)
def test_hidden_rows_of_a_cache(kind, monkeypatch):
    changes, parts = KINDS[kind]
    backbone = tiny_backbone(**changes)
    policy = TraceLockPolicy(scorer=scorer(backbone, spread=8.0), threshold=0.5)
    decoder = d.Decoder(**{**parts, "policy": policy})
    expected, found = both(monkeypatch, lambda: everything(decoder, backbone, PROMPTS, 12, 5)[0])
    assert found == expected


ASKED = [(), ("region", "entropy"), ("window",), ("logits", "margin"), ("region", "drawn")]


class Changing(Recorder):
    """Asks for something else at each step, and ends the decode at some."""

    def __init__(self, last):
        super().__init__()
        self.seen, self.last = [], last

    def on_step(self, record):
        proposal, cells = record.proposal, record.candidates
        scores = (proposal.prob, proposal.entropy, proposal.margin, proposal.drawn)
        kept = [None if one is None else one[cells] for one in scores]
        logits = None if record.denoised is None else record.denoised.logits.clone()
        self.seen.append([proposal.ids[cells], *kept, logits])
        self.requires = frozenset(ASKED[len(self.seen) % len(ASKED)])
        return len(self.seen) == self.last


@pytest.mark.parametrize("policy", [d.ThresholdPolicy(0.15), OnHost()])
@pytest.mark.parametrize("last", [14, 10_000])
def test_observers_that_ask_for_other_things_and_end_a_decode(policy, last, monkeypatch):
    decoder = d.Decoder(policy=policy, quota=d.NoQuota(), window=BlockWindow(3))

    def run():
        watching = Changing(last)
        found, _ = everything(decoder, tiny_backbone(), PROMPTS, 12, 5, watching)
        return found, watching.seen

    (expected, seen), (found, seen_found) = both(monkeypatch, run)
    assert found == expected
    torch.testing.assert_close(seen_found, seen)
    assert len(seen) == last or len(found["results"]) == len(PROMPTS)


def test_logits_are_kept_before_the_next_step_overwrites_them(monkeypatch):
    """Some steps give them out, of the whole response, and others do not; rounded to float16."""
    decoder = d.Decoder(policy=d.ThresholdPolicy(0.15), quota=d.NoQuota(), window=BlockWindow(4))
    kept = FeatureCapture(
        function=None,
        hidden_layers=(),
        groups=(97,),
        projector_digest="",
        steps=lambda seed: KeptSteps(seed, ratio=0.4),
        scheme="fp16",
        layout="logits",
    )

    def run():
        capture = TrajectoryCapture(vocab_size=97, level="logits", features=kept)
        return everything(decoder, tiny_backbone(), PROMPTS[:8], 12, 3, capture=capture)[1]

    for old, new in zip(*both(monkeypatch, run), strict=True):
        assert old.features.kept_steps.tolist() == new.features.kept_steps.tolist()
        values = (torch.tensor(one.features.dequantized()) for one in (new, old))
        torch.testing.assert_close(*values, rtol=2**-10, atol=1e-6)


def test_graphs_of_forwards_differ_by_their_columns(monkeypatch):
    decoder = d.Decoder(policy=OnHost(), quota=d.NoQuota(), window=BlockWindow(3))
    watching = Changing(10_000)
    with emulated(monkeypatch):
        everything(decoder, tiny_backbone(), [[5, 6, 7]] * 3, 24, 3, watching)
    assert len(EmulatedGraph.made) == 2  # of the window, and of the response
    # All but their first uses.
    assert sum(graph.num_replays for graph in EmulatedGraph.made) == len(watching.seen) - 2 > 5


@pytest.mark.parametrize(("kind", "limit"), [("whole", 150), ("dual", 30), ("blocks", 24)])
def test_large_forwards_run_eagerly_between_graphs(kind, limit, monkeypatch):
    changes, parts = KINDS[kind]
    for module in ("backbones.cache", "decoding.caches"):
        monkeypatch.setattr(f"lit_dlm.{module}.MOST_TOKENS", limit)
    decoder, backbone, watching = d.Decoder(**parts), tiny_backbone(**changes), Recorder()
    run = lambda: everything(decoder, backbone, PROMPTS, 12, 5, watching)[0]  # noqa: E731
    expected, found = both(monkeypatch, run)
    assert found == expected
    assert 0 < sum(graph.num_replays for graph in EmulatedGraph.made) < len(watching.records) // 3


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_beyond_the_most_graphs_run_eagerly(kind, monkeypatch):
    changes, parts = KINDS[kind]
    monkeypatch.setattr("lit_dlm.tensors.graphs.MOST_GRAPHS", 1)
    decoder, backbone = d.Decoder(**parts), tiny_backbone(**changes)
    expected, found = both(monkeypatch, lambda: everything(decoder, backbone, PROMPTS, 12, 5)[0])
    assert found == expected


def test_a_policy_that_reads_runs_beside_the_graph_of_the_forward(monkeypatch, caplog):
    decoder = d.Decoder(
        policy=OnHost(), window=BlockWindow(4), quota=d.NoQuota(), cache=d.DualCache()
    )
    expected, found = both(monkeypatch, lambda: tokens(decoder))
    assert found == expected
    assert not caplog.records


class Places(Recorder):
    """Notes where the large results of steps lie, by their sizes."""

    def __init__(self, *requires):
        super().__init__(*requires)
        self.places = {}

    def on_step(self, record):
        for one in (record.proposal.hidden, record.denoised and record.denoised.logits):
            if one is not None:
                self.places.setdefault(one.shape, set()).add(one.data_ptr())


@pytest.mark.parametrize(
    ("policy", "result"), [(d.ThresholdPolicy(0.15), "hidden"), (OnHost(), "logits")]
)
def test_large_results_of_all_graphs_lie_in_one_place(policy, result, monkeypatch):
    """Of a step as a graph and of a forward; a graph keeps its results as long as it lives."""
    cached = {"window": BlockWindow(4), "cache": d.DualCache(), "quota": d.NoQuota()}
    decoder, backbone, watching = (
        d.Decoder(policy=policy, **cached),
        tiny_backbone(),
        Places(result),
    )
    canvas = d.prompt_canvas(
        [torch.arange(10, 16)] * 4, response_length=24, spec=backbone.spec, seeds=range(4)
    )
    with emulated(monkeypatch):
        d.decode(backbone, decoder, canvas, [watching])
    assert sum(graph.num_replays > 0 for graph in EmulatedGraph.made) > len(watching.places)
    assert [len(places) for places in watching.places.values()] == [1] * len(watching.places)


def test_a_policy_that_reads_where_it_says_it_does_not_is_named(monkeypatch, caplog):
    decoder = d.Decoder(policy=Careless(), window=BlockWindow(4), quota=d.NoQuota())
    with emulated(monkeypatch, is_on=False):
        expected = tokens(decoder)
    with emulated(monkeypatch), caplog.at_level(logging.WARNING):
        assert tokens(decoder) == expected
    (line,) = caplog.messages
    assert line.startswith("Careless, BlockWindow, NoQuota: no CUDA graph, so steps run eagerly")
    assert "_local_scalar_dense" in line


@pytest.mark.parametrize("last", [0, 2])
def test_nothing_is_lost_where_memory_runs_out_at_a_recording(last, monkeypatch, caplog):
    """Graphs from before are dropped: eager steps may need their memory."""
    decoder = d.Decoder(**KINDS["dual"][1])
    with emulated(monkeypatch, is_on=False):
        expected = tokens(decoder)
    record, step, graphs, left = EmulatedGraph.record, GraphedBatch._step, [], []

    def full(self, call):
        EmulatedGraph.made.clear()
        graphs.append(ref(self))
        if len(graphs) > last:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return record(self, call)

    def counted(self, requires):
        left.append(sum(one() is not None for one in graphs))
        return step(self, requires)

    with emulated(monkeypatch), caplog.at_level(logging.WARNING):
        monkeypatch.setattr(EmulatedGraph, "record", full)
        monkeypatch.setattr(GraphedBatch, "_step", counted)
        assert tokens(decoder) == expected
    assert "CUDA out of memory" in caplog.text
    assert max(left) == last
    assert left[-1] == 0


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
        with pytest.raises(RuntimeError, match="previous error") as told:
            EmulatedGraph().record(call)
        assert isinstance(told.value.__cause__, HostReadError)


def test_the_emulator_replays_on_what_is_in_memory_now():
    memory = torch.tensor([1.0, 2.0])

    def call():
        doubled = memory * 2
        memory.add_(1.0)
        return doubled

    graph = EmulatedGraph()
    doubled = graph.record(call)
    assert memory.tolist() == [1.0, 2.0]  # recording runs nothing
    for step in range(3):
        graph.replay()
        assert doubled.tolist() == [2.0 + 2 * step, 4.0 + 2 * step]
    assert memory.tolist() == [4.0, 5.0]


def test_the_emulator_knows_when_memory_that_a_graph_reads_is_freed():
    memory = {"kept": torch.ones(3), "freed": torch.ones(3)}
    graph = EmulatedGraph()
    total = graph.record(lambda: memory["kept"][1:] + memory["freed"][1:])
    graph.replay()
    assert total.tolist() == [2.0, 2.0]
    memory["view"] = memory.pop("freed")[:1]
    graph.replay()
    del memory["view"]
    with pytest.raises(FreedMemoryError):
        graph.replay()
