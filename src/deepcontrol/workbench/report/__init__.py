"""Run folders to figures and a page."""

from .command import Report, run_report

__all__ = ["Report", "run_report"]
