"""Training: one step, and how it runs."""

from .step import Engine, TrainingStep

__all__ = ["Engine", "TrainingStep"]
