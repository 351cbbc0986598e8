"""AGC (automatic gain control) in models of other libraries: `python -m benchmarks.zoo`."""
