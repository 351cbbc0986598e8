"""Networks of a run for devices: ONNX, torch.export and ExecuTorch, each checked as it is made."""

from .command import Export, run_export

__all__ = ["Export", "run_export"]
