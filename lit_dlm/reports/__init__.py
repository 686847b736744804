"""Tables, plots and summaries made from result folders and shards."""

from lit_dlm.reports.plots import plot_front
from lit_dlm.reports.results import ResultFolder, ResultRow
from lit_dlm.reports.summary import MethodSummary, summarise, summarise_folder, write_summary
from lit_dlm.reports.tables import markdown_tables, terminal_tables

__all__ = [
    "MethodSummary",
    "ResultFolder",
    "ResultRow",
    "markdown_tables",
    "plot_front",
    "summarise",
    "summarise_folder",
    "terminal_tables",
    "write_summary",
]
