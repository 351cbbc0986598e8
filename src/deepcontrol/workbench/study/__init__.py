"""Studies: claims, the runs that they need, and the rules that judge them."""
