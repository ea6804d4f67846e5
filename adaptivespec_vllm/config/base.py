"""What all sections have in common."""

from __future__ import annotations

from typing import Final

from pydantic import BaseModel, ConfigDict

from adaptivespec_vllm.errors import ConfigError as ConfigError

METHOD: Final = "adaptivespec"
"""The value of ``method`` that asks for this package."""


class Section(BaseModel):
    """Keys that belong together: none but these, each of its own type."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
