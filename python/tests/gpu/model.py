"""The model to train: a small transformer with causal attention in plain PyTorch, and its batches.

All random numbers come from fixed seeds on the CPU, so that two processes train on the same data.
"""

import math
import random
from typing import Iterator, Tuple

import torch
from torch import Tensor, nn

VOCABULARY = 8192
LENGTH_MAX = 512


class Layer(nn.Module):
    """Attention and feed-forward, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_in, self.norm_out = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.forward_part = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        return (y := x + self.attend(self.norm_in(x))) + self.forward_part(self.norm_out(y))

    def attend(self, x: Tensor) -> Tensor:
        # Not a fused kernel: reproducible, and with more allocations.
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(later, float("-inf")).softmax(dim=-1) @ v
        return self.project(mixed.transpose(1, 2).reshape(batch, length, width))


class Transformer(nn.Module):
    """Tokens in, the logits of the next token out."""

    def __init__(self, layers: int = 6, width: int = 768, heads: int = 12) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH_MAX, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def reproducible() -> None:
    """Fixed seeds, deterministic kernels and full precision. The parent process sets CUBLAS_WORKSPACE_CONFIG."""
    torch.manual_seed(11)
    torch.use_deterministic_algorithms(True)
    # Otherwise every new tensor is filled, unlike in ordinary programs.
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def batches(steps: int, batch: int = 32) -> Iterator[Tuple[Tensor, Tensor]]:
    """Tokens and their successors, on the CPU; the length varies between steps."""
    lengths, numbers = random.Random(5), torch.Generator().manual_seed(7)
    for _ in range(steps):
        length = lengths.randrange(192, LENGTH_MAX + 1, 64)
        tokens = torch.randint(VOCABULARY, (batch, length + 1), generator=numbers)
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def step(model: Transformer, optimizer: torch.optim.Optimizer, tokens: Tensor, targets: Tensor) -> Tensor:
    """One step of training; the loss."""
    optimizer.zero_grad(set_to_none=True)
    logits = model(tokens.cuda())
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.cuda().flatten())
    loss.backward()
    optimizer.step()
    return loss.detach()
