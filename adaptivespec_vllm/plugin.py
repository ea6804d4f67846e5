"""Entry point of the group ``vllm.general_plugins``; vLLM calls :func:`register` in every process.

Nothing changes unless a speculative configuration names our method: each replacement hands everything else to the
original. A vLLM that we cannot work with is an error only then.
"""

from __future__ import annotations

import logging

from adaptivespec_vllm.engine import front_end, seams

WRAPS = (
    seams.Wrap(seams.ADD_CLI_ARGS, front_end.add_cli_args),
    seams.Wrap(seams.CREATE_ENGINE_CONFIG, front_end.create_engine_config),
    seams.Wrap(seams.CREATE_SPECULATIVE_CONFIG, front_end.create_speculative_config),
    seams.Wrap(seams.V2_UNSUPPORTED, front_end.v2_unsupported_features),
    seams.Wrap(seams.VALIDATE_SPEC_DECODE, front_end.validate_spec_decode),
)


def register() -> None:
    """Make vLLM know ``"method": "adaptivespec"``; calling it again does nothing."""
    for wrap in WRAPS:
        try:
            wrap.install()
        except (ImportError, AttributeError) as error:
            # not our business unless asked for: then vLLM itself refuses the unknown method
            logging.getLogger(__name__).debug("seam %s is missing: %s", wrap.seam.path, error)
