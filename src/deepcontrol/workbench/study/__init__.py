"""The paper's claims as experiments: what they need is trained, and each ends in a verdict."""
