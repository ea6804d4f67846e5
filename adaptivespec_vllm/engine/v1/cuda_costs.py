"""What a step costs on a GPU: the same parts as on a CPU, in their graphs, and levels as they are drafted ahead."""

from __future__ import annotations

import torch
from vllm.forward_context import set_forward_context

from adaptivespec_vllm import ops
from adaptivespec_vllm.draft import draft_ahead
from adaptivespec_vllm.engine.v1.costs import CONTEXT, Measurement


class CUDAMeasurement(Measurement):
    """The passes of a step over any number of rows, on made-up input; the clock waits for the device."""

    def _target(self, rows: int) -> None:
        runner = self._runner
        mode, batch = runner.cudagraph_dispatcher.dispatch(rows)
        padded = batch.num_tokens
        with set_forward_context(
            None, runner.vllm_config, num_tokens=padded, cudagraph_runtime_mode=mode, batch_descriptor=batch
        ):
            hidden, _ = runner.model(
                input_ids=runner.input_ids.gpu[:padded],
                positions=runner.positions[:padded],
                intermediate_tensors=None,
                inputs_embeds=None,
            )
        runner.model.compute_logits(hidden[:rows])

    def _first(self, rows: int) -> None:
        drafter = self._runner.drafter
        drafter.run_first_pass_alone(drafter.hidden_states.new_zeros(rows, drafter.model.model.fc_input_size), CONTEXT)
        hidden = drafter.hidden_states.new_zeros(rows, drafter.hidden_size)
        ops.topk_logprobs(drafter.head.logits(hidden), self._runner.max_width)

    def _level(self, rows: int) -> None:
        """Trees of two levels: the head runs over the first one."""
        drafter = self._runner.drafter
        log_probs, tokens = (children.to(self._runner.device) for children in self._children(rows))
        trees, width = tokens.shape
        hidden = drafter.hidden_states.new_zeros(trees, drafter.hidden_size)
        table = torch.zeros(trees, CONTEXT, dtype=torch.int32, device=self._runner.device)
        drafter.head.begin(hidden, [CONTEXT] * trees, table, width, 2)
        draft_ahead(drafter.head, log_probs, tokens, 2)

    def _stump(self, rows: int) -> None:
        """Trees of one level need no pass."""
