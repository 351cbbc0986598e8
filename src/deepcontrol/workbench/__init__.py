"""Networks, data, training, the paper's experiments, reports and benchmarks.

The workbench needs the extra `deepcontrol[workbench]`; the library outside this package needs only
torch.
"""

# The commands and their lines in `deepcontrol --help`, which also works without the extra.
COMMANDS = {
    "train": "Train a network, or resume a run.",
    "eval": "Evaluate a checkpoint on the validation images.",
    "predict": "Label images with a trained network.",
    "export": "Export a trained network for deployment.",
    "report": "Write an HTML page about runs or a study.",
    "reproduce": "Test the claims of the paper.",
    "bench": "Measure step time and memory against other norms.",
    "data": "Set up, check or draw a dataset.",
    "demo": "Compare AGC and BatchNorm at batch size 1, in under 3 minutes.",
    "doctor": "Show versions and devices, and test the ops.",
}
