"""Scenarios of `torch.compile` with CUDA graphs (graph trees): a small model trains and generates. run.py compares what
they give with PyTorch's own allocator.

Kernels are tuned and compiled by the first process; the others find them in the cache that run.py names in
TORCHINDUCTOR_CACHE_DIR, so that all run the same ones.
"""

import random
from typing import Any, List

import child
import torch
from child import check, data

import model as models

STEPS, LENGTH, GENERATED = 12, 32, 24


def reduce_overhead(allocator: str) -> None:
    """Graph trees with the kernels that are usual."""
    _compiled(allocator, "reduce-overhead", width=256, layers=2)


def max_autotune(allocator: str) -> None:
    """Graph trees with kernels that are chosen by trial."""
    _compiled(allocator, "max-autotune", width=128, layers=1)


def _compiled(allocator: str, mode: str, width: int, layers: int) -> None:
    child.enable(allocator)
    torch.manual_seed(11)
    torch.set_float32_matmul_precision("highest")
    model = models.Transformer(layers=layers, width=width, heads=4).cuda()
    losses = _train(model, torch.compile(model, mode=mode))
    tokens = _generate(torch.compile(model.eval(), mode=mode))
    _check_trees()
    check("losses fall", losses[-1] < losses[0], f"{losses[0]:.4f} to {losses[-1]:.4f}")
    data(losses=[loss.hex() for loss in losses], tokens=tokens)


def _train(model: Any, compiled: Any) -> List[float]:
    """Steps of two lengths of sequences, so that there are several graphs."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    numbers, order, losses = torch.Generator().manual_seed(7), random.Random(5), []
    same = torch.randint(models.VOCABULARY, (8, 2 * LENGTH + 1), generator=numbers)
    for _ in range(STEPS):
        length = order.choice((LENGTH, 2 * LENGTH))
        tokens, targets = same[:, :length].cuda(), same[:, 1 : length + 1].cuda()
        # The results of the step before are not used any more.
        torch.compiler.cudagraph_mark_step_begin()
        optimizer.zero_grad(set_to_none=True)
        logits = compiled(tokens)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _generate(compiled: Any) -> List[int]:
    """Tokens, one after the other, from the last ones."""
    tokens = torch.randint(models.VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(3)).cuda()
    generated: List[int] = []
    with torch.no_grad():
        for _ in range(GENERATED):
            torch.compiler.cudagraph_mark_step_begin()
            chosen = compiled(tokens)[:, -1].argmax(dim=-1, keepdim=True)
            generated.append(int(chosen))
            tokens = torch.cat((tokens[:, 1:], chosen), dim=1)
    return generated


def _check_trees() -> None:
    from torch._dynamo.utils import counters
    from torch._inductor import cudagraph_trees

    manager = cudagraph_trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    graphs = 0 if manager is None else manager.new_graph_id().id
    check("graph trees were used", graphs >= 3, f"{graphs} graphs")
    skipped = counters["inductor"].get("cudagraph_skips", 0)
    check("for everything", skipped == 0, f"{skipped} skipped")
