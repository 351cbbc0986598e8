"""Convert models of other libraries to AGC (automatic gain control): `python -m benchmarks.zoo`."""
