"""Convert other libraries' models to AGC: `python -m benchmarks.zoo`.

AGC is automatic gain control.
"""
