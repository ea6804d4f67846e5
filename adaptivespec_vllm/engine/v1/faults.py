"""What may fail without harm: drafts never decide text, so a step whose drafting fails decodes plainly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vllm.logger import init_logger

logger = init_logger("vllm.adaptivespec")  # below vLLM's own, so that it is shown


class DraftFaults:
    """Errors of drafting, and of learning from drafts, on one worker.

    Args:
        ranks: workers that decode together. With several, an error is raised: the others would go on with a tree that
            this one does not have, and wait for it in the head's collective calls.

    """

    def __init__(self, ranks: int) -> None:
        self._alone = ranks == 1
        self.count = 0
        """Errors so far."""

    @contextmanager
    def tolerated(self, what: str) -> Iterator[None]:
        """Leave the block at its error; the first one is logged with its trace."""
        try:
            yield
        except Exception as error:
            if not self._alone:
                raise
            self.count += 1
            if self.count == 1:
                logger.exception(
                    "AdaptiveSpec: %s failed; the requests of such a step decode plainly, with the right text. "
                    "Further errors are counted, not shown",
                    what,
                )
            else:
                logger.debug("AdaptiveSpec: %s failed again (%d): %r", what, self.count, error)
