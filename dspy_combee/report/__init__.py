"""Reports of a run, from its step records alone: the HTML page and the plots."""

from dspy_combee.report.page import RunReport, html_page, report_main

__all__ = ["RunReport", "html_page", "report_main"]
