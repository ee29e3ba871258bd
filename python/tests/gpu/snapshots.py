"""Programs that record a memory snapshot as PyTorch's documentation says (`stacks="all"`), and write down what each
tensor was: `python snapshots.py FOLDER [PROGRAM ...]`.

For each program there are then `PROGRAM.pickle.xz`, the snapshot, and `PROGRAM.truth.json`: the blocks that were
allocated at the peak (or when memory ran out) with the category that the program itself gave them, by address and
time, and what `torch.cuda.memory_stats` said. `crates/cli/tests/categories.py` compares `warpool explain` with it.

A category is written down where it is known: parameters and buffers when the model exists, gradients by a hook that is
called after a gradient was accumulated, the state of the optimizer after its step, inputs by the loop, activations by
the hooks that autograd calls for every tensor that it saves for the backward pass, and for what the forward pass
returns. A block that nobody wrote down is a temporary.
"""

import bisect
import gc
import json
import lzma
import os
import pickle
import sys
import time
from collections import defaultdict
from typing import Any, Callable, Dict, Iterable, List, Tuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HERE = os.path.dirname(os.path.abspath(__file__))
PROGRAMS: Dict[str, Callable[["Truth"], None]] = {}
# How the history of a program is recorded, if not by default.
RECORDED: Dict[str, Dict[str, Any]] = {}


class Truth:
    """What each tensor is, by the address of its storage and the time at which that was known."""

    # Where a storage has several: the parameter that is an input stays a parameter.
    ORDER = ("parameters", "optimizer_state", "gradients", "inputs", "activations")

    def __init__(self) -> None:
        self.labels: List[Tuple[int, int, int]] = []
        self.before_history: Callable[[], None] = lambda: None

    def label(self, category: str, tensors: Iterable[Any]) -> None:
        now, number = time.time_ns() // 1000, self.ORDER.index(category)
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.is_cuda:
                self.labels.append((now, tensor.untyped_storage().data_ptr(), number))

    def model(self, model: nn.Module) -> None:
        """Parameters, buffers, and from now on the gradients."""
        self.label("parameters", [*model.parameters(), *model.buffers()])
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda it: self.label("gradients", [it.grad]))

    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self.label("optimizer_state", [it for state in optimizer.state.values() for it in state.values()])

    def saving(self) -> Any:
        """A context in which the tensors that autograd saves are activations."""

        def pack(tensor: Tensor) -> Tensor:
            self.label("activations", [tensor])
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    def blocks(self, snapshot: Dict[str, Any], stats: Dict[str, Any]) -> Dict[str, Any]:
        """The allocated blocks at the last out-of-memory event, or else at the peak of requested bytes."""
        events = snapshot["device_traces"][0]
        ooms = [at for at, event in enumerate(events) if event["action"] == "oom"]
        live: Dict[int, Tuple[int, int]] = {}
        # Blocks from before the history: those that are freed in it first, and those that are still there.
        seen = set()
        for event in events:
            if event["action"] in ("alloc", "free_requested") and event["addr"] not in seen:
                seen.add(event["addr"])
                if event["action"] == "free_requested":
                    live[event["addr"]] = (event["size"], -1)
        for segment in snapshot["segments"]:
            for block in segment["blocks"]:
                if block["state"] == "active_allocated" and block["address"] not in seen:
                    live[block["address"]] = (block["requested_size"], -1)
        total = sum(size for size, _ in live.values())
        best, found, at_best = -1, {}, None
        lives: Dict[int, List[Tuple[int, int]]] = defaultdict(list)
        for at, event in enumerate(events):
            action, addr = event["action"], event.get("addr")
            if action == "alloc":
                live[addr] = (event["size"], at)
                total += event["size"]
                lives[addr].append((event["time_us"], at))
            elif action == "free_requested" and addr in live:
                total -= live.pop(addr)[0]
            is_moment = at == ooms[-1] if ooms else total > best
            if is_moment:
                best, at_best, found = total, at, dict(live)
        categories: Dict[int, int] = {}
        for now, addr, number in self.labels:
            known = lives.get(addr, [])
            # The clocks of Python and of the history differ by some microseconds.
            before = bisect.bisect_right(known, (now + 50, 1 << 60))
            key = known[before - 1][1] if before else -1 - addr
            categories[key] = min(categories.get(key, 99), number)
        names = [*self.ORDER]
        blocks = []
        for addr, (size, at) in sorted(found.items()):
            number = categories.get(at if at >= 0 else -1 - addr)
            blocks.append([addr, size, names[number] if number is not None else "temporaries"])
        sums: Dict[str, int] = defaultdict(int)
        for _, size, name in blocks:
            sums[name] += size
        return {
            "event": at_best,
            "is_oom": bool(ooms),
            "requested_bytes": best,
            "by_category": dict(sums),
            "allocated_peak": stats.get("allocated_bytes.all.peak"),
            "reserved_peak": stats.get("reserved_bytes.all.peak"),
            "device_bytes_total": torch.cuda.get_device_properties(0).total_memory,
            "blocks": blocks,
        }


def program(name: str, **recorded: Any) -> Callable[..., Any]:
    def add(function: Callable[[Truth], None]) -> Callable[[Truth], None]:
        PROGRAMS[name] = function
        RECORDED[name] = recorded
        return function

    return add


# Recordings that are kept: see recordings/README.md.


def gpt2(layers: int = 8) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=layers, n_embd=768, n_head=12, use_cache=False))


def llama(layers: int = 8, width: int = 1024, **options: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 3,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        vocab_size=32000,
        **options,
    )
    return LlamaForCausalLM(config)


def train_gpt2(truth: Truth, steps: int = 4) -> None:
    model = gpt2().cuda()
    truth.model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(steps):
        tokens = torch.randint(50257, (8, 512)).cuda()
        truth.label("inputs", [tokens])
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16), truth.saving():
            out = model(tokens, labels=tokens)
        truth.label("activations", [out.loss, out.logits])
        out.loss.backward()
        optimizer.step()
        truth.optimizer(optimizer)


program("train.default")(train_gpt2)
program("train_python", stacks="python")(train_gpt2)
program("train_alloc", context="alloc", stacks="python")(train_gpt2)
program("train_alloc_all", context="alloc")(train_gpt2)
program("train_state", context="state")(train_gpt2)
program("train_none", context=None)(train_gpt2)


@program("generate.default")
def generate(truth: Truth) -> None:
    model = llama(layers=6).to("cuda", dtype=torch.bfloat16).eval()
    truth.model(model)
    tokens = torch.randint(32000, (8, 256), device="cuda")
    truth.label("inputs", [tokens])
    cache = None
    with torch.no_grad():
        for _ in range(16):
            out = model(tokens, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            truth.label(
                "activations", [out.logits, *(it for layer in cache.layers for it in (layer.keys, layer.values))]
            )
            tokens = out.logits[:, -1:].argmax(dim=-1)


class ConvNet(nn.Module):
    """A residual network for images."""

    def __init__(self, width: int = 64, blocks: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 7, stride=2, padding=3)
        self.blocks = nn.ModuleList(Residual(width) for _ in range(blocks))
        self.head = nn.Linear(width, 1000)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.stem(images))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=(2, 3)))


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.layers(x))


def train_images(truth: Truth, batches: Iterable[int], size: int = 128, **options: Any) -> None:
    model = ConvNet(**options).cuda()
    truth.model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in batches:
        images, labels = torch.randn(batch, 3, size, size).cuda(), torch.randint(1000, (batch,)).cuda()
        truth.label("inputs", [images, labels])
        with truth.saving():
            out = model(images)
            loss = F.cross_entropy(out, labels)
        truth.label("activations", [out, loss])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        truth.optimizer(optimizer)


@program("oom_device.default")
def oom_device(truth: Truth) -> None:
    """Larger batches until the device is full."""
    train_images(truth, [64 << step for step in range(12)])


@program("oom_limit.default")
def oom_limit(truth: Truth) -> None:
    """A transformer under a fraction of the device, which sequences of varying length fragment."""
    torch.cuda.set_per_process_memory_fraction(0.045)
    model = gpt2(layers=6).cuda()
    truth.model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    lengths = torch.Generator().manual_seed(3)
    for step in range(60):
        length = int(torch.randint(64, 420 + 8 * step, (1,), generator=lengths))
        tokens = torch.randint(50257, (8, min(length, 1000))).cuda()
        truth.label("inputs", [tokens])
        optimizer.zero_grad()
        with truth.saving():
            out = model(tokens, labels=tokens)
        truth.label("activations", [out.loss, out.logits])
        out.loss.backward()
        optimizer.step()
        truth.optimizer(optimizer)


@program("leak.default")
def leak(truth: Truth) -> None:
    """Predictions are kept for a metric, with the graph that made them."""
    torch.cuda.set_per_process_memory_fraction(0.02)
    model = nn.Sequential(
        nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 4096), nn.GELU(), nn.Linear(4096, 1024)
    ).cuda()
    truth.model(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    predictions = []
    for _ in range(400):
        features, targets = torch.randn(2048, 1024).cuda(), torch.randn(2048, 1024).cuda()
        truth.label("inputs", [features, targets])
        with truth.saving():
            predicted = model(features)
            loss = F.mse_loss(predicted, targets)
        truth.label("activations", [predicted, loss])
        predictions.append(predicted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        truth.optimizer(optimizer)


@program("streams.default")
def streams(truth: Truth) -> None:
    """The next batch is copied on a stream of its own; a teacher runs on another."""
    student, teacher = ConvNet(blocks=6).cuda(), ConvNet(blocks=6).cuda().eval()
    truth.model(student)
    truth.label("parameters", [*teacher.parameters(), *teacher.buffers()])
    optimizer = torch.optim.AdamW(student.parameters())
    copies, second = torch.cuda.Stream(), torch.cuda.Stream()

    def fetch(step: int) -> Tensor:
        with torch.cuda.stream(copies):
            images = torch.randn(32 + 8 * (step % 3), 3, 128, 128, pin_memory=True).cuda(non_blocking=True)
        truth.label("inputs", [images])
        return images

    following = fetch(0)
    for step in range(8):
        torch.cuda.current_stream().wait_stream(copies)
        images, following = following, fetch(step + 1)
        images.record_stream(torch.cuda.current_stream())
        second.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(second), torch.no_grad():
            images.record_stream(second)
            targets = teacher(images)
        torch.cuda.current_stream().wait_stream(second)
        targets.record_stream(torch.cuda.current_stream())
        with truth.saving():
            out = student(images)
            loss = F.mse_loss(out, targets)
        truth.label("activations", [out, loss, targets])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        truth.optimizer(optimizer)


# Further programs, for the categories alone.


@program("images")
def images(truth: Truth) -> None:
    train_images(truth, [96] * 4)


@program("images_last_channels")
def images_last_channels(truth: Truth) -> None:
    model = ConvNet().cuda().to(memory_format=torch.channels_last)
    truth.model(model)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-4)
    loss_of = nn.CrossEntropyLoss()
    for _ in range(4):
        images = torch.randn(64, 3, 128, 128).to("cuda", memory_format=torch.channels_last)
        labels = torch.randint(1000, (64,), device="cuda")
        truth.label("inputs", [images, labels])
        with truth.saving(), torch.autocast("cuda", dtype=torch.float16):
            out = model(images)
            loss = loss_of(out, labels)
        truth.label("activations", [out, loss])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        truth.optimizer(optimizer)


@program("checkpointed")
def checkpointed(truth: Truth) -> None:
    """A language model whose layers are computed again in the backward pass."""
    model = llama(layers=8, use_cache=False).cuda()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    truth.model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for _ in range(3):
        tokens = torch.randint(32000, (4, 1024), device="cuda")
        truth.label("inputs", [tokens])
        with truth.saving(), torch.autocast("cuda", dtype=torch.bfloat16):
            out = model(tokens, labels=tokens)
        truth.label("activations", [out.loss, out.logits])
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        truth.optimizer(optimizer)


@program("scaled")
def scaled(truth: Truth) -> None:
    """Half precision with a scaler, two batches for each step, and clipped gradients."""
    model = gpt2(layers=6).cuda()
    truth.model(model)
    optimizer, scaler = torch.optim.Adam(model.parameters(), lr=1e-4), torch.amp.GradScaler("cuda")
    for step in range(6):
        tokens = torch.randint(50257, (4, 512), device="cuda")
        truth.label("inputs", [tokens])
        with truth.saving(), torch.autocast("cuda", dtype=torch.float16):
            out = model(tokens, labels=tokens)
        truth.label("activations", [out.loss, out.logits])
        scaler.scale(out.loss / 2).backward()
        if step % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            truth.optimizer(optimizer)


@program("frozen")
def frozen(truth: Truth) -> None:
    """Most parameters are frozen; adapters are trained. The average of their weights is kept."""

    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.down, self.up = (
                nn.Linear(base.in_features, 16, bias=False),
                nn.Linear(16, base.out_features, bias=False),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.up(self.down(x))

    layer = nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True)
    model = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False).requires_grad_(False)
    for block in model.layers:
        block.linear1, block.linear2 = Adapted(block.linear1), Adapted(block.linear2)
    model.cuda()
    truth.model(model)
    trained = [it for it in model.parameters() if it.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    average = torch.optim.swa_utils.AveragedModel(model)
    truth.label("parameters", [*average.parameters(), *average.buffers()])
    for _ in range(4):
        features = torch.randn(16, 384, 1024, device="cuda")
        truth.label("inputs", [features])
        with truth.saving():
            out = model(features)
            loss = out.square().mean()
        truth.label("activations", [out, loss])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        truth.optimizer(optimizer)


@program("recurrent")
def recurrent(truth: Truth) -> None:
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(20000, 512),
            "lstm": nn.LSTM(512, 1024, 2, batch_first=True),
            "head": nn.Linear(1024, 20000),
        }
    ).cuda()
    truth.model(model)
    optimizer = torch.optim.Adagrad(model.parameters())
    for _ in range(4):
        tokens = torch.randint(20000, (32, 128), device="cuda")
        truth.label("inputs", [tokens])
        with truth.saving():
            out = model["head"](model["lstm"](model["embed"](tokens))[0])
            loss = F.cross_entropy(out.flatten(0, 1), tokens.flatten())
        truth.label("activations", [out, loss])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        truth.optimizer(optimizer)


@program("compiled")
def compiled(truth: Truth) -> None:
    model = nn.Sequential(
        *[
            nn.Sequential(nn.Linear(2048, 4096), nn.GELU(), nn.Linear(4096, 2048), nn.LayerNorm(2048))
            for _ in range(6)
        ]
    ).cuda()
    truth.model(model)
    optimizer = torch.optim.AdamW(model.parameters())
    fast = torch.compile(model)
    for _ in range(4):
        features = torch.randn(4096, 2048, device="cuda")
        truth.label("inputs", [features])
        with truth.saving():
            out = fast(features)
            loss = out.square().mean()
        truth.label("activations", [out, loss])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        truth.optimizer(optimizer)


@program("made_on_device")
def made_on_device(truth: Truth) -> None:
    """The model is made on the device; the weights are then loaded from a state dict; validation follows."""
    with torch.device("cuda"):
        model = ConvNet(width=96)
    weights = {
        name: torch.randn(it.shape) if it.is_floating_point() else torch.zeros(it.shape, dtype=it.dtype)
        for name, it in model.state_dict().items()
    }
    model.load_state_dict(weights)
    truth.model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    for step in range(4):
        images, labels = torch.randn(48, 3, 128, 128, device="cuda"), torch.randint(1000, (48,), device="cuda")
        truth.label("inputs", [images, labels])
        with truth.saving():
            out = model(images)
            loss = F.cross_entropy(out, labels)
        truth.label("activations", [out, loss])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        truth.optimizer(optimizer)
        model.eval()
        with torch.no_grad():
            validation = torch.randn(64, 3, 128, 128, device="cuda")
            truth.label("inputs", [validation])
            scores = model(validation)
            truth.label("activations", [scores])
        model.train()


@program("replicated")
def replicated(truth: Truth) -> None:
    """One rank of DistributedDataParallel."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29577")
    torch.distributed.init_process_group("nccl", rank=0, world_size=1)
    model = nn.parallel.DistributedDataParallel(gpt2(layers=6).cuda(), gradient_as_bucket_view=True)
    truth.label("parameters", [*model.parameters(), *model.buffers()])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(3):
        tokens = torch.randint(50257, (4, 512)).cuda()
        truth.label("inputs", [tokens])
        optimizer.zero_grad()
        with truth.saving():
            out = model(tokens, labels=tokens)
        truth.label("activations", [out.loss, out.logits])
        out.loss.backward()
        truth.label("gradients", [it.grad for it in model.parameters()])
        optimizer.step()
        truth.optimizer(optimizer)
    torch.distributed.destroy_process_group()


@program("late", late=True)
def late(truth: Truth) -> None:
    """The history starts after the first steps, as many people record it."""
    model = gpt2(layers=6).cuda()
    truth.model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(5):
        if step == 2:
            truth.before_history()
        tokens = torch.randint(50257, (4, 512)).cuda()
        truth.label("inputs", [tokens])
        with truth.saving():
            out = model(tokens, labels=tokens)
        truth.label("activations", [out.loss, out.logits])
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        truth.optimizer(optimizer)


def without_this_machine(snapshot: Dict[str, Any]) -> None:
    """Leaves out of the file names where Python and the program are installed."""
    known: Dict[str, str] = {}
    seen = set()

    def short(file: str) -> str:
        if "site-packages/" in file:
            return "/usr/lib/python3.12/site-packages/" + file.rsplit("site-packages/", 1)[1]
        return "/home/me/" + os.path.basename(file) if file.endswith(".py") and file.startswith(HERE) else file

    stacks = [entry.get("frames") for entry in snapshot["device_traces"][0]]
    stacks += [block.get("frames") for segment in snapshot["segments"] for block in segment["blocks"]]
    stacks += [segment.get("frames") for segment in snapshot["segments"]]
    for frame in (frame for stack in stacks for frame in stack or ()):
        if id(frame) not in seen:
            seen.add(id(frame))
            frame["filename"] = known.setdefault(frame["filename"], short(frame["filename"]))


def run(name: str, folder: str) -> None:
    truth, options = Truth(), dict(RECORDED[name])
    torch.manual_seed(1)
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()

    def record() -> None:
        torch.cuda.memory._record_memory_history(**options)

    if options.pop("late", False):
        truth.before_history = record
    else:
        record()
    try:
        PROGRAMS[name](truth)
    except torch.cuda.OutOfMemoryError as error:
        print(f"{name}: {str(error)[:200]}", flush=True)
        error.__traceback__ = None
    stats = dict(torch.cuda.memory_stats())
    snapshot = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(enabled=None)
    without_this_machine(snapshot)
    with lzma.open(f"{folder}/{name}.pickle.xz", "wb", preset=9) as file:
        pickle.dump(snapshot, file, protocol=4)
    found = truth.blocks(snapshot, stats)
    with open(f"{folder}/{name}.truth.json", "w") as file:
        json.dump(found, file, separators=(",", ":"))
    events = len(snapshot["device_traces"][0])
    print(
        name,
        events,
        "events",
        {key: found[key] for key in found if key != "blocks"},
        os.path.getsize(f"{folder}/{name}.pickle.xz"),
        "bytes",
        flush=True,
    )


def main() -> None:
    folder, names = sys.argv[1], sys.argv[2:] or list(PROGRAMS)
    os.makedirs(folder, exist_ok=True)
    if len(names) == 1:
        run(names[0], folder)
        return
    # Each in a process of its own: settings and limits are per process.
    for name in names:
        gc.collect()
        if os.system(f"{sys.executable} {__file__} {folder} {name}"):
            print(f"{name}: failed", flush=True)


if __name__ == "__main__":
    main()
