"""Prints the table of ``docs/metrics.md``."""

from adaptivespec_vllm.engine.metrics.catalogue import markdown_table

print(markdown_table(), end="")
