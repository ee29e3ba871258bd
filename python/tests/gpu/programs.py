"""Records programs for `warpool replay`: `python programs.py NAME SECONDS FILE.pickle.xz`.

Every step of them has other sizes, which is hard for an allocator: nothing fits where it was before. They compute
nothing of use. Sizes come from a fixed seed, but how many steps there are depends on the machine.
"""

import lzma
import pickle
import random
import sys
import time
from typing import Any, Callable, Dict, List, Tuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

GPU = "cuda"
DRAWS = random.Random(0)
Step = Callable[[], None]


def between(least: int, most: int) -> int:
    """A random size."""
    return DRAWS.randint(least, most)


def update(loss: Tensor, optimizers: List[torch.optim.Optimizer]) -> None:
    """The second half of a step."""
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def gnn_train() -> Step:
    """Three layers over random subgraphs: less than 1 GiB."""
    width = 128
    features = torch.randn(200_000, width, device=GPU)
    layers = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(3)).to(GPU)
    optimizer = torch.optim.Adam(layers.parameters())

    def step() -> None:
        nodes = between(8_000, 30_000)
        state = features[torch.randint(len(features), (nodes,), device=GPU)]
        for layer in layers:
            source, target = torch.randint(nodes, (2, nodes * between(5, 15)), device=GPU)
            received = torch.zeros_like(state).index_add_(0, target, state[source])
            state = functional.relu(layer(torch.cat([state, received], 1)))
        update(state.square().mean(), [optimizer])

    return step


def diffusion_train() -> Step:
    """A U-Net of three levels on images of several formats, with averaged weights."""

    def level(channels: int, out: int) -> nn.Module:
        return nn.Sequential(nn.GroupNorm(8, channels), nn.SiLU(), nn.Conv2d(channels, out, 3, padding=1))

    down = nn.ModuleList([level(128, 128), level(128, 256), level(256, 512)])
    up = nn.ModuleList([level(1024, 256), level(512, 128), level(256, 128)])
    ends = nn.ModuleList([nn.Conv2d(4, 128, 3, padding=1), nn.Conv2d(128, 4, 3, padding=1)])
    model = nn.ModuleList([down, up, ends]).to(GPU)
    weights = list(model.parameters())
    averages = [weight.detach().clone() for weight in weights]
    optimizer = torch.optim.AdamW(weights)

    def step() -> None:
        height, width = DRAWS.choice([(64, 64), (64, 96), (96, 64), (80, 80), (128, 64), (96, 96)])
        images = torch.randn(DRAWS.choice([16, 24, 32]), 4, height, width, device=GPU)
        with torch.autocast(GPU, torch.bfloat16):
            state, passed = ends[0](images), []
            for layer in down:
                state = layer(state)
                passed.append(state)
                state = functional.avg_pool2d(state, 2)
            for layer in up:
                other = passed.pop()
                state = layer(torch.cat([functional.interpolate(state, size=other.shape[2:]), other], 1))
            loss = functional.mse_loss(ends[1](state).float(), images)
        update(loss, [optimizer])
        with torch.no_grad():
            torch._foreach_lerp_(averages, weights, 0.01)

    return step


class Layer(nn.Module):
    """Of a transformer; each token goes to two of the experts if there are some."""

    def __init__(self, width: int, heads: int, experts: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.projections, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        inner = 2 * width if experts else 4 * width
        self.gate = nn.Linear(width, experts) if experts else None
        self.networks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width)) for _ in range(max(1, experts))
        )

    def forward(self, state: Tensor) -> Tensor:
        batch, length, width = state.shape
        split = self.projections(self.norms[0](state)).view(batch, length, 3, self.heads, -1)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        state = state + self.out(mixed.transpose(1, 2).reshape(state.shape))
        tokens = self.norms[1](state)
        if self.gate is None:
            return state + self.networks[0](tokens)
        tokens = tokens.reshape(-1, width)
        shares, chosen = self.gate(tokens).softmax(-1).topk(2, -1)
        result = torch.zeros_like(tokens)
        for expert, network in enumerate(self.networks):
            rows, place = (chosen == expert).nonzero(as_tuple=True)
            if rows.numel():
                result.index_add_(0, rows, network(tokens[rows]) * shares[rows, place, None])
        return state + result.view(state.shape)


def language_model(
    width: int, layers: int, tokens: int, length: int, dtype: torch.dtype, experts: int = 0, recompute: bool = False
) -> Step:
    """Batches of about as many tokens, with other lengths in every step."""
    words = width * 16
    first, last = nn.Embedding(words, width), nn.Linear(width, words)
    middle = nn.ModuleList(Layer(width, width // 64, experts) for _ in range(layers))
    model = nn.ModuleList([first, middle, last]).to(GPU, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        columns = between(length // 8, length)
        batch = torch.randint(words, (max(1, tokens // columns), columns), device=GPU)
        state = first(batch)
        for layer in middle:
            state = checkpoint(layer, state, use_reentrant=False) if recompute else layer(state)
        update(functional.cross_entropy(last(state).float().view(-1, words), batch.view(-1)), [optimizer])

    return step


def recsys_train() -> Step:
    """Twelve tables with sparse gradients, and a small network."""
    tables = nn.ModuleList(nn.Embedding(between(50_000, 2_000_000), 64, sparse=True) for _ in range(12)).to(GPU)
    network = nn.Sequential(nn.Linear(64 * 12, 1024), nn.ReLU(), nn.Linear(1024, 1)).to(GPU)
    optimizers = [torch.optim.SGD(tables.parameters(), lr=0.1), torch.optim.Adam(network.parameters())]

    def step() -> None:
        rows = DRAWS.choice([8192, 16384, 32768])
        indices = [torch.randint(table.num_embeddings, (rows, between(1, 20)), device=GPU) for table in tables]
        update(network(torch.cat([table(index).sum(1) for table, index in zip(tables, indices)], 1)).mean(), optimizers)

    return step


def speech_train() -> Step:
    """Recurrent layers over sounds of 2 to 16 seconds."""
    convolutions = nn.Sequential(nn.Conv1d(80, 512, 5, 2, 2), nn.ReLU(), nn.Conv1d(512, 512, 5, 2, 2)).to(GPU)
    recurrent = nn.LSTM(512, 768, 4, bidirectional=True, batch_first=True).to(GPU)
    last = nn.Linear(1536, 5000).to(GPU)
    optimizer = torch.optim.Adam(nn.ModuleList([convolutions, recurrent, last]).parameters(), lr=1e-4)

    def step() -> None:
        length = between(200, 1600)
        batch = max(4, 32_000 // length)
        state = convolutions(torch.randn(batch, 80, length, device=GPU)).transpose(1, 2)
        guess = last(recurrent(state)[0]).log_softmax(-1).transpose(0, 1)
        text = torch.randint(1, 5000, (batch, len(guess) // 4), device=GPU)
        sizes = [torch.full((batch,), size) for size in (len(guess), len(guess) // 4)]
        update(functional.ctc_loss(guess, text, *sizes), [optimizer])

    return step


def rollouts() -> Step:
    """Reinforcement learning: observations are collected, made one tensor, and learned from."""
    network = nn.Sequential(
        *(nn.Conv2d(4, 64, 8, 4), nn.ReLU(), nn.Conv2d(64, 128, 4, 2), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(128 * 81, 1024), nn.ReLU(), nn.Linear(1024, 18)),
    ).to(GPU)
    optimizer = torch.optim.Adam(network.parameters())

    @torch.no_grad()
    def collect() -> Tuple[Tensor, Tensor]:
        seen = [torch.rand(DRAWS.choice([256, 512]), 4, 84, 84, device=GPU) for _ in range(between(40, 120))]
        done = [network(observation).argmax(1) for observation in seen]
        return torch.cat(seen), torch.cat(done)

    def step() -> None:
        seen, done = collect()
        for part in torch.randperm(len(seen), device=GPU).split(8192):
            update(functional.cross_entropy(network(seen[part]), done[part]), [optimizer])

    return step


def serve() -> Step:
    """Six requests at a time, whose keys and values are copied to a longer block for every token."""
    width, heads, dtype = 2048, 16, torch.bfloat16
    shapes = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
    layers = [[torch.randn(shape, device=GPU, dtype=dtype) * 0.02 for shape in shapes] for _ in range(16)]
    requests: List[List[Any]] = []

    @torch.no_grad()
    def run(state: Tensor, cache: Dict[int, Tuple[Tensor, Tensor]]) -> Tensor:
        batch, length, _ = state.shape
        for number, (projections, out, wide, narrow) in enumerate(layers):
            query, key, value = (state @ projections).view(batch, length, 3, heads, -1).permute(2, 0, 3, 1, 4)
            if number in cache:
                key, value = (torch.cat(both, 2) for both in zip(cache[number], (key, value)))
            cache[number] = (key, value)
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=length > 1)
            state = state + mixed.transpose(1, 2).reshape(state.shape) @ out
            state = state + functional.gelu(state @ wide) @ narrow
        return state[:, -1:] * 0.1

    def step() -> None:
        while len(requests) < 6:
            prompt = torch.randn(between(1, 8), between(50, 3000), width, device=GPU, dtype=dtype) * 0.1
            cache: Dict[int, Tuple[Tensor, Tensor]] = {}
            requests.append([run(prompt, cache), cache, between(5, 120)])
        for request in requests:
            request[0] = run(request[0], request[1])
            request[2] -= 1
        requests[:] = [request for request in requests if request[2] > 0]

    return step


def streams_train() -> Step:
    """Four networks, each on a stream of its own, with input from the current one."""

    def network() -> nn.Module:
        sizes = [3, *[64] * 8]
        parts = [[nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU()] for i, o in zip(sizes, sizes[1:])]
        return nn.Sequential(*(layer for part in parts for layer in part)).to(GPU)

    sides = [(torch.cuda.Stream(), network()) for _ in range(4)]
    optimizers = [torch.optim.SGD(network.parameters(), lr=0.01) for _, network in sides]

    def step() -> None:
        for (stream, network), optimizer in zip(sides, optimizers):
            size = DRAWS.choice([160, 192, 224, 256])
            images = torch.randn(between(8, 40), 3, size, size, device=GPU)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                images.record_stream(stream)
                update(network(images).mean(), [optimizer])

    return step


PROGRAMS: Dict[str, Callable[[], Step]] = {
    "diffusion_train": diffusion_train,
    "gnn_train": gnn_train,
    "lm_train": lambda: language_model(512, 6, 8192, 512, torch.float32),
    "lm_train_large": lambda: language_model(2560, 24, 24576, 4096, torch.bfloat16),
    "lm_train_recompute": lambda: language_model(2048, 20, 32768, 4096, torch.bfloat16, recompute=True),
    "moe_train": lambda: language_model(1024, 10, 16384, 2048, torch.bfloat16, experts=8),
    "recsys_train": recsys_train,
    "rollouts": rollouts,
    "serve": serve,
    "speech_train": speech_train,
    "streams_train": streams_train,
}


def main() -> None:
    if len(sys.argv) != 4 or sys.argv[1] not in PROGRAMS:
        sys.exit(f"{__doc__}\nNAME is one of: {', '.join(PROGRAMS)}")
    name, seconds, path = sys.argv[1], float(sys.argv[2]), sys.argv[3]
    torch.manual_seed(0)
    torch.cuda.memory._record_memory_history(context=None, max_entries=3_000_000)
    step, end, steps = PROGRAMS[name](), time.monotonic() + seconds, 0
    while time.monotonic() < end:
        step()
        steps += 1
    torch.cuda.synchronize()
    snapshot, stats = torch.cuda.memory._snapshot(), torch.cuda.memory_stats()
    with lzma.open(path, "wb") as file:
        pickle.dump(snapshot, file, protocol=4)
    peaks = [stats[f"{kind}_bytes.all.peak"] >> 20 for kind in ("allocated", "reserved")]
    events = sum(map(len, snapshot["device_traces"]))
    print(f"{name}: {steps} steps, {events} events, {peaks[0]} MiB allocated, {peaks[1]} MiB reserved")


if __name__ == "__main__":
    main()
