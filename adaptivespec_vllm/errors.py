"""The error of a configuration; here, because a machine without pydantic knows it too."""

from __future__ import annotations


class ConfigError(ValueError):
    """A configuration that cannot be used: names the key, what was given and what is allowed."""
