"""`deepcontrol export`: write the network of a run as ONNX, torch.export or ExecuTorch file."""

from .command import Export, run_export

__all__ = ["Export", "run_export"]
