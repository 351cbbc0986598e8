"""Training runs: `deepcontrol train` and `deepcontrol eval`."""
