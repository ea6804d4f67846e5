"""Settings of every test."""

from __future__ import annotations

from hypothesis import settings

# How long an example takes says how busy the machine is, not whether it is right.
settings.register_profile("adaptivespec", deadline=None)
settings.load_profile("adaptivespec")
