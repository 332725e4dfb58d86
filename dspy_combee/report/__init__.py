"""Reports of a run, from its step records alone: the HTML page, tables and plots."""

from dspy_combee.report.page import html_page, report_main, save_html

__all__ = ["html_page", "report_main", "save_html"]
