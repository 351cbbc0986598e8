"""The workbench: networks, data, training, the paper's experiments, reports and benchmarks.

It needs the extra `deepcontrol[workbench]`; the library outside this package needs only torch.
"""
