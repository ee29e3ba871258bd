"""Scenarios of `torch.compile` with CUDA graphs (graph trees): a small model trains and generates. run.py compares what
they give with PyTorch's own allocator.

Kernels are tuned and compiled by the first process; the others find them in the cache that run.py names in
TORCHINDUCTOR_CACHE_DIR, so that all run the same ones.
"""

import random
from typing import Any, List, Sequence

import child
import torch
from child import check, data, note

import model as models

STEPS, LENGTH, GENERATED = 12, 32, 24
# Both models have at least this many tokens.
TOKENS = 512


def reduce_overhead(allocator: str) -> None:
    """Graph trees with the kernels that are usual. Sequences of two lengths, so that there are several graphs."""
    child.enable(allocator)
    torch.manual_seed(11)
    _compiled(models.Transformer(layers=2, width=256, heads=4), "reduce-overhead", (LENGTH, 2 * LENGTH))


def max_autotune(allocator: str) -> None:
    """Graph trees with kernels that are chosen by trial, which takes long: a model with one matrix product, and few
    kernels to choose from, all compiled in this process."""
    child.enable(allocator)
    from torch._inductor import config

    config.compile_threads = 1
    config.max_autotune_gemm_backends = "ATEN,TRITON"
    config.test_configs.max_mm_configs = 2
    torch.manual_seed(11)
    model = torch.nn.Sequential(torch.nn.Embedding(TOKENS, 128), torch.nn.GELU(), torch.nn.Linear(128, TOKENS))
    _compiled(model, "max-autotune", (LENGTH,))


def _compiled(model: Any, mode: str, lengths: Sequence[int]) -> None:
    torch.set_float32_matmul_precision("highest")
    model = model.cuda()
    losses = _train(model, torch.compile(model, mode=mode), lengths)
    note("trained", f"{STEPS} steps")
    tokens = _generate(torch.compile(model.eval(), mode=mode))
    _check_trees(1 + 2 * len(lengths))
    check("losses fall", losses[-1] < losses[0], f"{losses[0]:.4f} to {losses[-1]:.4f}")
    data(losses=[loss.hex() for loss in losses], tokens=tokens)


def _train(model: Any, compiled: Any, lengths: Sequence[int]) -> List[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    numbers, order, losses = torch.Generator().manual_seed(7), random.Random(5), []
    same = torch.randint(TOKENS, (8, max(lengths) + 1), generator=numbers)
    for _ in range(STEPS):
        length = order.choice(lengths)
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
    tokens = torch.randint(TOKENS, (1, LENGTH), generator=torch.Generator().manual_seed(3)).cuda()
    generated: List[int] = []
    with torch.no_grad():
        for _ in range(GENERATED):
            torch.compiler.cudagraph_mark_step_begin()
            chosen = compiled(tokens)[:, -1].argmax(dim=-1, keepdim=True)
            generated.append(int(chosen))
            tokens = torch.cat((tokens[:, 1:], chosen), dim=1)
    return generated


def _check_trees(least: int) -> None:
    from torch._dynamo.utils import counters
    from torch._inductor import cudagraph_trees

    manager = cudagraph_trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    graphs = 0 if manager is None else manager.new_graph_id().id
    check("graph trees were used", graphs >= least, f"{graphs} graphs")
    skipped = counters["inductor"].get("cudagraph_skips", 0)
    check("for everything", skipped == 0, f"{skipped} skipped")
