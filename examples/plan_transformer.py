"""Fit a transformer's training into a budget: which blocks to recompute, the peak it then has.

    pip install transformers        # random weights: nothing is fetched
    python examples/plan_transformer.py

A Llama of 8 blocks on the CPU.  The plan says what the step will hold; the step is then measured.
"""

from __future__ import annotations

from typing import Any

import torch

from repro.checkpointing import BlockPlan, memory_meter, plan_blocks

SHARES = (1.0, 0.7, 0.4)


def model_and_call() -> tuple[Any, torch.Tensor, dict[str, Any]]:
    """A Llama, token ids (2, 256), and the other arguments of a training step."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=352,
        vocab_size=1000,
    )
    ids = torch.randint(1000, (2, 256))
    return LlamaForCausalLM(config).train(), ids, {"labels": ids, "use_cache": False}


def measured_peak_bytes(plan: BlockPlan, model: Any, ids: torch.Tensor, call: dict) -> int:
    """Peak of a step that follows the plan, weights and their gradients being there before."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with plan.applied(model), memory_meter(ids.device) as meter, meter.region("step") as step:
        out = model(ids, **call)
        out.loss.backward()
    return step.peak_bytes + ids.nbytes


def main() -> None:
    model, ids, call = model_and_call()
    everything = plan_blocks(model, ids, call, budget_bytes=2**50, repeats=1)
    for share in SHARES:
        budget = round(share * everything.predicted_peak_bytes)
        plan = plan_blocks(model, ids, call, budget_bytes=budget, repeats=1)
        measured = measured_peak_bytes(plan, model, ids, call)
        print(f"budget {budget / 2**20:.1f} MiB: {plan}\n  measured {measured / 2**20:.1f} MiB\n")
    print(plan.code())


if __name__ == "__main__":
    main()
