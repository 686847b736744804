import pytest
from rich.console import Console

from lit_dlm.reports.tables import print_table


@pytest.mark.parametrize(("width", "shown"), [(20, 0), (40, 0), (70, 2), (80, 3)])
def test_names_are_whole_at_any_width_and_columns_without_room_are_named(
    width: int, shown: int, capsys
):
    """Names of 30 and 28 characters with three values of 12."""
    names, headers = (
        ["tracelock_blocks_gsm8k_step_99", "accuracy_of_a_long_task_name"],
        ["m", "a", "b", "c"],
    )
    print_table(Console(width=width), "task", headers, [[name, *["1" * 12] * 3] for name in names])
    told = capsys.readouterr().out
    assert all(name in told for name in names)
    assert told.count("1" * 12) == 2 * shown
    left_out = f"No room for: {', '.join(headers[1 + shown :])}"
    assert (left_out in told) == (shown < 3)
    assert "…" not in told
