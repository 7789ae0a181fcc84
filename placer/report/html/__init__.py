"""The HTML report of a placement: one self-contained file.

:func:`report_data` gathers its data, :func:`write_report` writes it. The scripts in
``placer/report/assets`` draw the page.
"""

from placer.report.html.commands import Command, Source, next_commands
from placer.report.html.data import report_data
from placer.report.html.page import page, write_report

__all__ = [
    "Command",
    "Source",
    "next_commands",
    "page",
    "report_data",
    "write_report",
]
