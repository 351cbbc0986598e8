"""Run folders to figures and a page."""

from .command import Report, run_report
from .study_page import write_study_page

__all__ = ["Report", "run_report", "write_study_page"]
