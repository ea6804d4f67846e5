"""One engine of vLLM that answers rows as its OpenAI server would: chat templates, tools, grammars, refusals."""

from __future__ import annotations

import asyncio
import uuid
from argparse import Namespace
from contextlib import AsyncExitStack
from typing import Any

from adaptivespec_vllm.batch.rows import CHAT, REQUESTS, Row

_SECONDS_TO_END = 10
"""For an engine that has nothing left to do; vLLM's own 0 would kill its processes at once."""


def parse(arguments: list[str]) -> Namespace:
    """vLLM's own command line, as ``vllm run-batch`` has it; exits with a message for what is wrong."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.run_batch import BaseFrontendArgs  # not where it is defined: that has moved in 0.33
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="adaptivespec batch", usage="adaptivespec batch IN OUT [vLLM's options]")
    BaseFrontendArgs.add_cli_args(parser)
    AsyncEngineArgs.add_cli_args(parser)
    parsed = parser.parse_args(arguments)
    parsed.shutdown_timeout = parsed.shutdown_timeout or _SECONDS_TO_END
    return parsed


def model_name(arguments: Namespace) -> str:
    """What requests call the model."""
    names = arguments.served_model_name or [arguments.model]
    return str(names if isinstance(names, str) else names[0])


class AnsweringEngine:
    """An engine with vLLM's OpenAI handlers; it is started by the first row, in the event loop that asks."""

    def __init__(self, arguments: Namespace) -> None:
        self._arguments = arguments
        self._starting = asyncio.Lock()
        self._handlers: dict[str, Any] = {}
        self._open = AsyncExitStack()
        self._failure: Exception | None = None
        self.slots = 0
        """Sequences that the engine decodes together; set once it is started."""

    async def start(self) -> None:
        """Start the engine; calling it again does nothing."""
        async with self._starting:
            if self._failure is not None:
                raise self._failure
            if not self._handlers:
                try:
                    await self._start()
                except Exception as error:
                    self._failure = error  # of all rows that wait for it
                    raise

    async def _start(self) -> None:
        from starlette.datastructures import State
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
        from vllm.usage.usage_lib import UsageContext

        client = await self._open.enter_async_context(
            build_async_engine_client(self._arguments, usage_context=UsageContext.OPENAI_BATCH_RUNNER)
        )
        state = State()
        await init_app_state(client, state, self._arguments, await client.get_supported_tasks())
        self.slots = client.vllm_config.scheduler_config.max_num_seqs
        self._handlers = {
            url: state.openai_serving_chat.create_chat_completion
            if url == CHAT
            else state.openai_serving_completion.create_completion
            for url in REQUESTS
        }

    async def answer(self, row: Row) -> dict[str, Any]:
        """A line of the output; a request that vLLM refuses is answered by its refusal.

        Raises:
            EngineDeadError: the engine has ended; the row is not answered.

        """
        from vllm.entrypoints.serve import create_error_response
        from vllm.v1.engine.exceptions import EngineDeadError

        await self.start()
        try:
            response = await self._handlers[row.url](REQUESTS[row.url].model_validate(row.body))
        except EngineDeadError:
            raise
        except Exception as error:  # as vLLM's server does with whatever a handler raises
            response = create_error_response(error)
        body = response.model_dump(mode="json")
        status = body["error"]["code"] if "error" in body else 200
        return {
            "id": f"batch_req_{uuid.uuid4().hex}",
            "custom_id": row.custom_id,
            "response": {"status_code": status, "request_id": body.get("id") or uuid.uuid4().hex, "body": body},
            "error": None,
        }

    async def close(self) -> None:
        """End the engine."""
        await self._open.aclose()
