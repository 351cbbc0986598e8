"""Pages, figures and text from run folders and study folders."""

from .command import Report, run_report

__all__ = ["Report", "run_report"]
