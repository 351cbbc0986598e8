"""Training: `deepcontrol train` and `deepcontrol eval`."""
