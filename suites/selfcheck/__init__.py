"""The suites judged: planted faults that they must kill, right variants that they must pass."""
