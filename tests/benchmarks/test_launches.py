"""What decoding asks of a GPU, counted at released sizes: a regression shows without one."""

from collections.abc import Iterator
from functools import cache

import pytest
import torch

from tests.processes import ROOT

pytestmark = pytest.mark.slow  # models of seven billion parameters, counted


@pytest.fixture(scope="module", autouse=True)
def _each_is_counted_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        import launches

        patch.setattr(launches.DecodeCase, "__hash__", object.__hash__)
        for name in ("decode_counts", "graph_report", "training_counts"):
            patch.setattr(launches, name, cache(getattr(launches, name)))
        yield


EAGER = (
    "dream_b1_dual", "dream_b1_top_p", "dream_b16_dual", "dream_b64_dual", "dream_b16",
    "dream_b16_padded", "sdar_b1", "sdar_b64", "sdar_4b_b1", "sdar_4b_b64", "llada2_b1",
    "llada2_b64", "sdar_b64_prompts", "greedy", "drawn", "filtered",
    "sft", "tabom", "tracerl", "tracelock",
)  # fmt: skip
"""Cases in the order of the page's first table."""
LONG = {"dream_b16_dual", "dream_b64_dual", "llada2_b64"}
"""Cases of 32 eager steps, which take ten seconds each to count."""
GRAPHED = (
    "dream_b1_dual", "dream_b1_top_p", "dream_b16_dual", "dream_b64_dual",
    "sdar_b1", "sdar_b64", "llada2_b1", "llada2_b64",
)  # fmt: skip
"""Cases in the order of its second table, where SDAR-4B shares the rows of SDAR-8B."""


def test_launches_bytes_waits_and_mixed_devices_are_counted_and_views_are_not() -> None:
    """2 x 3 by 3 x 4 in bfloat16: (6 + 12 + 8) cells of two bytes; a broadcast row is read once."""
    from launches import LaunchCounter

    left = torch.empty(2, 3, dtype=torch.bfloat16, device="meta")
    right = torch.empty(4, 3, dtype=torch.bfloat16, device="meta")
    with LaunchCounter(lambda _: None) as counter:
        left.view(6).unsqueeze(0)
        torch.mm(left, right.T)
        assert (counter.counts.launches, counter.counts.bytes) == (1, 52)
        left + left[:1].expand(2, -1)
        assert counter.counts.bytes == 52 + 2 * (6 + 3 + 6)
        torch.empty(2, 4, dtype=torch.bfloat16, device="meta").addmm_(left, right.T)
    assert counter.counts.bytes == 82 + 2 * (8 + 6 + 12 + 8)
    assert counter.counts.waits.total() == counter.counts.mixed.total() == 0

    values = torch.empty(4, dtype=torch.long, device="meta")
    with LaunchCounter(lambda tensor: [7] * len(tensor) if tensor.ndim else True) as counter:
        assert values.tolist() == [7] * 4
        assert bool(values.any())
        values[torch.arange(4)]
        values + torch.tensor(4)  # a number
        torch.arange(4).to("meta", non_blocking=True)
        torch.arange(4).to("meta")
    assert dict(counter.counts.waits) == {"tolist": 1, "__bool__": 1, "copy": 1}
    assert dict(counter.counts.mixed) == {"index": 1}


def test_a_step_of_released_models_waits_once_and_stays_within_its_launches() -> None:
    from launches import report

    told = report(["sdar_b64", "dream_b1_dual", "dream_b16", "dream_b16_padded"])
    assert (told["host_waits_per_step"], told["mixed_devices"]) == (1.0, 0)
    most = {"sdar_b64_launches": 1200, "sdar_b64_roofline_ms": 12.5}
    most |= {"dream_b1_dual_launches": 820, "dream_b16_padded_bytes_ratio": 1.1}
    assert not {name: told[name] for name, limit in most.items() if told[name] > limit}


def test_the_host_launches_little_beside_the_graph_of_a_step() -> None:
    """One row and 64 with each kind of cache; a step in one block, or rounds of rows in turn.

    With the look: the plan's upload, the replay; first masks, their stack with the status, a read.
    """
    from launches import GRAPHED, graph_report

    told = graph_report()
    # A filter stays outside: it waits to know whether it has looked at enough ids.
    assert told["dream_b1_top_p_outside_with_look"] <= 200
    for name in {*GRAPHED} - {"dream_b1_top_p"}:
        assert told[f"{name}_outside"] <= 12, name
        assert told[f"{name}_outside_with_look"] <= 25, name
        assert told[f"{name}_inside_graph"] > 800, name
        assert (told[f"{name}_waits"], told[f"{name}_uploads"]) == (1, 1), name
    assert {"dream_b1_dual", "dream_b64_dual", "sdar_b1", "sdar_b64"} <= {*GRAPHED}
    assert {"sdar_4b_b1", "sdar_4b_b64", "llada2_b1", "llada2_b64"} <= {*GRAPHED}


def test_a_replay_is_one_launch_and_what_a_graph_cannot_hold_is_refused() -> None:
    from launches import CountedGraph, Counts, LaunchCounter

    values = torch.empty(4, device="meta")
    with LaunchCounter(lambda _: 7.0) as counter, pytest.MonkeyPatch.context() as patch:
        patch.setattr(CountedGraph, "counter", counter, raising=False)
        graph = CountedGraph(None)
        with pytest.raises(RuntimeError, match="__float__"):
            graph.record(lambda: float(values.sum()))
        assert counter.counts == Counts()
        graph.record(lambda: values + values.sum())
        graph.replay()
        graph.replay()
    assert (counter.counts.launches, counter.counts.inside) == (2, 4)


def test_drawing_the_tokens_of_64_blocks_takes_few_launches_and_bytes() -> None:
    """256 cells of 151,936 ids in bfloat16 are 78 MB, so their float32 softmax is read four times.

    Host waits: only a filter asks whether it has looked at enough ids.
    """
    from launches import SAMPLERS, sampling_counts

    counted = {name: sampling_counts(sampler) for name, sampler in SAMPLERS.items()}
    assert counted["greedy"].launches <= 10
    assert counted["drawn"].launches <= 52
    assert counted["drawn"].bytes <= 1.1e9
    assert counted["filtered"].launches <= 90
    assert [counts.waits.total() for counts in counted.values()] == [0, 0, 1]
    assert not any(counts.mixed for counts in counted.values())


def test_autocast_rounds_products_widens_sums_and_casts_weights_once() -> None:
    from launches import MixedPrecision

    weight = torch.nn.Parameter(torch.empty(4, 4, device="meta"))
    rows = torch.empty(2, 4, dtype=torch.bfloat16, device="meta")
    with MixedPrecision() as mixed:
        product = torch.nn.functional.linear(rows.float(), weight)
        assert (product.dtype, product.sum().dtype) == (torch.bfloat16, torch.float32)
        rows @ weight
        assert len(mixed._weights) == 1
        with mixed.switched("meta", enabled=False):
            assert torch.nn.functional.linear(rows.float(), weight).dtype == torch.float32


def test_rows_out_of_phase_fill_the_tiles_of_attention() -> None:
    """SDAR-8B: 32 heads on 8, ``4 * 128`` FLOPs a score, 36 layers; no mask, no launches for one.

    A prompt of 512 tokens is one sequence under a mask, ``4 * 512`` queries by 512 keys.
    """
    from launches import CASES, decode_counts

    counts = decode_counts(CASES["sdar_b64"])
    steps = CASES["sdar_b64"].steps
    assert counts.by_name["_varlen_attn"] == 36 * steps
    assert counts.by_name["attention"] == counts.by_name["mask"] == 0
    assert counts.waits == {"tolist": steps}
    assert counts.mixed.total() == 0
    # A row has one window, of two blocks where it enters one: then both are sequences.
    keys = range(1024 + 376, 1024 + 384)
    sequences = (64 + 16) * 36 * steps
    tile = 8 * 128 * 4 * 128
    assert counts.tile_flops <= sequences * tile * (-(-keys[-1] // 64) * 64)
    prompts = decode_counts(CASES["sdar_b64_prompts"])
    one = 36 * 8 * (4 * 512) * 512 * 4 * 128
    assert 64 * one <= prompts.tile_flops <= 1.1 * 64 * one


@pytest.mark.parametrize(
    ("case", "waits", "most", "gigabytes"),
    [
        ("sft", 2, 4400, 310),
        ("tabom", 3, 4500, 312),
        ("tracelock", 0, 480, 12.5),
        ("tracerl", 3, 7500, 535),
    ],
)
def test_a_training_step_keeps_to_its_launches_bytes_and_waits(
    case: str, waits: int, most: int, gigabytes: float
) -> None:
    """Cells and rows that count are asked for, and whether the loss is finite; nothing else is."""
    from launches import training_counts

    counts = training_counts(case)
    assert (counts.waits.total(), counts.mixed.total()) == (waits, 0)
    assert counts.launches <= most  # with the casts of autocast
    assert counts.bytes <= gigabytes * 1e9


def rows_of_page(head: str) -> list[list[str]]:
    """What the page's table with this first line shows, row by row, without the names of rows."""
    text = (ROOT / "docs" / "results" / "real_size" / "index.md").read_text()
    lines = text.partition(head)[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.split("|")[2:-1]] for line in lines]


def counted(case: str) -> list[float]:
    """A step's launches, roofline in ms, GB, attention in TFLOP and host waits."""
    import launches

    steps = 1
    if case in launches.CASES:
        counts, steps = launches.decode_counts(launches.CASES[case]), launches.CASES[case].steps
    elif case in launches.SAMPLERS:
        counts = launches.sampling_counts(launches.SAMPLERS[case])
    else:
        counts = launches.training_counts(case)
    found = counts.launches, 1e3 * counts.seconds, counts.bytes / 1e9, counts.tile_flops / 1e12
    return [one / steps for one in (*found, counts.waits.total())]


def shown_otherwise(shown: list[str], figures: list[float]) -> list[tuple[str, float]]:
    """Returns figures that a row shows, rounded otherwise than to its own digits."""
    return [
        (text, figure)
        for text, figure in zip(shown, figures, strict=True)
        if text and text != f"{figure:,.{len(text.partition('.')[2])}f}"
    ]


def test_the_page_shows_what_is_counted() -> None:
    from launches import graph_report

    eager = dict(zip(EAGER, rows_of_page("| a step of | launches | roofline"), strict=True))
    wrong = {name: shown_otherwise(eager[name], counted(name)) for name in {*EAGER} - LONG}
    told = graph_report()
    rows = rows_of_page("| a step of | before: launches")
    for name, (before, *shown) in zip(GRAPHED, rows, strict=True):
        assert before == eager[name][0]
        for case in {name, name.replace("sdar_", "sdar_4b_")}:
            parts = ("outside", "outside_with_look", "inside_graph", "uploads", "waits")
            figures = [told[f"{case}_{part}"] for part in parts]
            wrong[f"{case}, graphed"] = shown_otherwise(shown, figures)
    assert not {name: found for name, found in wrong.items() if found}


def test_packing_saves_tokens_and_tiles_save_attention() -> None:
    """A response of 512 cells: 4 x (640 + 515) tokens apart, 640 + 4 x 515 together."""
    from block_attention import row_counts

    apart, half, packed = (row_counts(copies) for copies in (1, 2, 4))
    tokens = [told["row_tokens"] for told in (apart, half, packed)]
    assert tokens == [4 * 1155, 2 * 1670, 2700]
    assert packed["tile_teraflops"] <= 0.7 * apart["tile_teraflops"]
    assert packed["tile_teraflops"] <= 0.3 * packed["matrix_teraflops"]
    assert packed["tile_megabytes"] <= 1e-3 * packed["matrix_megabytes"]
