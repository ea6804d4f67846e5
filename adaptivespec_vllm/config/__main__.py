"""Prints the key table of ``docs/configuration.md``."""

from adaptivespec_vllm.config.explain import markdown_table

print(markdown_table(), end="")
