"""A server under load, every answer that can be known checked: ``python -m benchmarks.soak --help``."""
