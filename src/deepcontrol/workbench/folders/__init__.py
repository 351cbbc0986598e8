"""Run and study folders: file names, records, checksums, lock.

Does not import torch.
"""
