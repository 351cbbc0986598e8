"""The workbench: networks, data, training, the paper's experiments, reports and benchmarks.

Needs the extra `deepcontrol[workbench]`; the library beside it needs torch alone.
"""
