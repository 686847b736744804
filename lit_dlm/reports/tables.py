"""Tables of results on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import HEAVY_HEAD, Box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table


def print_table(
    console: Console,
    title: str,
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    box: Box = HEAVY_HEAD,
) -> None:
    """Prints a table; if it is too wide, the last columns are left out, and named below it."""
    unbounded = console.options.update(width=10_000)
    # Rich would shorten cells until nothing can be told apart; whole columns can be asked for by a
    # wider terminal, and are in the files. The last ones are those that matter least.
    for num_columns in range(len(headers), 0, -1):
        table = Table(title=title, title_justify="left", title_style="bold", box=box)
        for number, header in enumerate(headers[:num_columns]):
            table.add_column(header, justify="right" if number else "left", no_wrap=True)
        for row in rows:
            table.add_row(*row[:num_columns])
        table.width = Measurement.get(console, unbounded, table).maximum
        if table.width <= console.width:
            break
    console.print(table, soft_wrap=True)
    if left_out := headers[num_columns:]:
        console.print(f"No room for: {', '.join(left_out)}", style="dim", highlight=False)
