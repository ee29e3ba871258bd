"""Programs whose memory is predicted and compared with what they take: plain PyTorch, as somebody may write it.

Each function makes a model and returns a step. All sizes are fixed, random numbers are seeded by the caller. They know
nothing of Warpool. `predict_truth.py` measures them.
"""

import math
import os
from collections import deque
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

Step = Callable[[], Any]
PROGRAMS: Dict[str, Callable[[], Step]] = {}


def program(function: Callable[[], Step]) -> Callable[[], Step]:
    """Registers a program."""
    PROGRAMS[function.__name__] = function
    return function


# Language models.


@program
def gpt2_adamw() -> Step:
    """GPT-2 of transformers in single precision, AdamW, clipped gradients."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config()).cuda()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    def step() -> None:
        tokens = torch.randint(50257, (4, 768)).cuda()
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(f"loss {loss.item():.3f}")

    return step


@program
def llama_checkpointing() -> Step:
    """Llama of transformers, gradient checkpointing, bfloat16 by autocast, AdamW, a schedule."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=1280,
        intermediate_size=3456,
        num_hidden_layers=12,
        num_attention_heads=20,
        num_key_value_heads=4,
        vocab_size=32000,
        use_cache=False,
    )
    device = torch.device("cuda")
    model = LlamaForCausalLM(config).to(device)
    model.gradient_checkpointing_enable()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))

    def step() -> None:
        tokens = torch.randint(32000, (4, 2048), device=device)
        with torch.autocast(device_type="cuda", dtype=torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)

    return step


@program
def t5_adafactor() -> Step:
    """T5 of transformers: encoder, decoder, masks, Adafactor."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=768,
        d_ff=2048,
        num_layers=8,
        num_heads=12,
        vocab_size=32128,
        feed_forward_proj="gated-gelu",
        decoder_start_token_id=0,
        use_cache=False,
    )
    model = T5ForConditionalGeneration(config).to("cuda")
    model.train()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2)

    def step() -> None:
        source = torch.randint(2, 32128, (12, 512))
        mask = torch.ones_like(source)
        mask[:, 400:] = 0
        target = torch.randint(2, 32128, (12, 128))
        target[:, 100:] = -100
        batch = {"input_ids": source, "attention_mask": mask, "labels": target}
        batch = {name: value.to("cuda") for name, value in batch.items()}
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


class Sentences(Dataset):
    """Tokens, a mask, and labels for some of them."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> Dict[str, Tensor]:
        numbers = torch.Generator().manual_seed(index)
        tokens = torch.randint(1000, 30522, (384,), generator=numbers)
        labels = torch.where(torch.rand(384, generator=numbers) < 0.15, tokens, torch.full_like(tokens, -100))
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


@program
def bert_loader() -> Step:
    """BERT of transformers from a DataLoader with pinned memory, two batches for each step of AdamW."""
    from transformers import BertConfig, BertForMaskedLM, get_linear_schedule_with_warmup

    model = BertForMaskedLM(BertConfig()).to("cuda")
    no_decay = ("bias", "LayerNorm.weight")
    groups = [
        {"params": [p for n, p in model.named_parameters() if not n.endswith(no_decay)], "weight_decay": 0.01},
        {"params": [p for n, p in model.named_parameters() if n.endswith(no_decay)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=5e-5)
    schedule = get_linear_schedule_with_warmup(optimizer, 10, 100)
    batches = iter(DataLoader(Sentences(), batch_size=16, shuffle=True, num_workers=2, pin_memory=True, drop_last=True))
    model.train()

    def step() -> None:
        for _ in range(2):
            batch = {name: value.to("cuda", non_blocking=True) for name, value in next(batches).items()}
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(**batch).loss / 2
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        model.zero_grad()

    return step


@program
def mixtral() -> Step:
    """A small Mixtral of transformers, bfloat16 by autocast, AdamW."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=768,
        intermediate_size=1536,
        num_hidden_layers=6,
        num_attention_heads=12,
        num_key_value_heads=4,
        num_local_experts=8,
        num_experts_per_tok=2,
        vocab_size=32000,
        output_router_logits=True,
        use_cache=False,
    )
    model = MixtralForCausalLM(config).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        tokens = torch.randint(32000, (4, 1024), device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


class Experts(nn.Module):
    """Each token goes to two of the networks; a token that finds no room is dropped."""

    def __init__(self, width: int, experts: int, capacity: float = 1.25) -> None:
        super().__init__()
        self.gate, self.capacity = nn.Linear(width, experts, bias=False), capacity
        self.networks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(experts)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        flat = tokens.reshape(-1, tokens.shape[-1])
        shares, chosen = self.gate(flat).softmax(-1).topk(2, -1)
        room = int(self.capacity * 2 * len(flat) / len(self.networks))
        result = torch.zeros_like(flat)
        for number, network in enumerate(self.networks):
            # The tokens with the largest share of this expert.
            share = torch.where(chosen == number, shares, 0).sum(-1)
            share, rows = share.topk(room)
            result.index_add_(0, rows, network(flat[rows]) * share[:, None])
        return result.view_as(tokens)


class Block(nn.Module):
    """Attention and a network, or experts."""

    def __init__(self, width: int, heads: int, experts: int = 0) -> None:
        super().__init__()
        self.heads, self.first, self.second = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.split, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.network = Experts(width, experts) if experts else network

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.split(self.first(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = (it.transpose(1, 2) for it in split.unbind(2))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.network(self.second(x))


@program
def experts_capacity() -> Step:
    """A mixture of experts of our own, with index_add_ and room for a fixed number of tokens, in bfloat16."""
    words, width = 16000, 768
    embedding, head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
    blocks = nn.Sequential(*(Block(width, 12, experts=6) for _ in range(4)))
    model = nn.Sequential(embedding, blocks, nn.LayerNorm(width), head).to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        tokens = torch.randint(words, (16, 1024), device="cuda")
        logits = model(tokens)
        loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


class LoRA(nn.Module):
    """A frozen linear layer and a product of two narrow ones."""

    def __init__(self, base: nn.Linear, rank: int = 16, alpha: int = 32) -> None:
        super().__init__()
        self.base, self.scale, self.drop = base, alpha / rank, nn.Dropout(0.05)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / math.sqrt(base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        lower = F.linear(self.drop(x), self.down.to(x.dtype))
        return self.base(x) + F.linear(lower, self.up.to(x.dtype)) * self.scale


@program
def lora_finetuning() -> Step:
    """A frozen Llama in bfloat16; its projections have low-rank additions in single precision."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=1536,
        intermediate_size=4096,
        num_hidden_layers=16,
        num_attention_heads=12,
        num_key_value_heads=4,
        vocab_size=32000,
        use_cache=False,
        dtype=torch.bfloat16,
    )
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).bfloat16()
    model.requires_grad_(False)
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(layer.self_attn, name, LoRA(getattr(layer.self_attn, name)).cuda())
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-4)
    model.train()

    def step() -> None:
        tokens = torch.randint(32000, (2, 1024), device="cuda")
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 0.3)
        optimizer.step()
        optimizer.zero_grad()

    return step


# Inference.


@program
def generate_dynamic_cache() -> Step:
    """Sampling with `generate` of transformers: the cache of keys and values grows by a copy for each token."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=8,
        vocab_size=32000,
        dtype=torch.bfloat16,
        pad_token_id=0,
        eos_token_id=None,
    )
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).bfloat16()
    model.eval()

    def step() -> None:
        prompt = torch.randint(1, 32000, (16, 1024), device="cuda")
        mask = torch.ones_like(prompt)
        with torch.inference_mode():
            model.generate(prompt, attention_mask=mask, max_new_tokens=24, do_sample=True, top_k=50, temperature=0.8)

    return step


@program
def static_cache() -> Step:
    """Greedy decoding of several requests into a cache that is allocated once."""
    width, heads, layers, words, room, batch = 2048, 16, 12, 32000, 2048, 16
    embedding = nn.Embedding(words, width, device="cuda", dtype=torch.float16)
    blocks = nn.ModuleList(Block(width, heads) for _ in range(layers)).to("cuda", torch.float16).eval()
    norm = nn.LayerNorm(width, device="cuda", dtype=torch.float16)
    shape = (layers, 2, batch, heads, room, width // heads)
    cache = torch.zeros(shape, device="cuda", dtype=torch.float16)

    @torch.no_grad()
    def run(tokens: Tensor, at: int) -> Tensor:
        x, length = embedding(tokens), tokens.shape[1]
        for number, block in enumerate(blocks):
            split = block.split(block.first(x)).view(batch, length, 3, heads, -1)
            query, key, value = (it.transpose(1, 2) for it in split.unbind(2))
            cache[number, 0, :, :, at : at + length] = key
            cache[number, 1, :, :, at : at + length] = value
            keys, values = cache[number, :, :, :, : at + length]
            mixed = F.scaled_dot_product_attention(query, keys, values, is_causal=length > 1)
            x = x + block.out(mixed.transpose(1, 2).reshape(batch, length, width))
            x = x + block.network(block.second(x))
        return (norm(x[:, -1:]) @ embedding.weight.t()).argmax(-1)

    def step() -> None:
        tokens = run(torch.randint(words, (batch, 1500), device="cuda"), 0)
        for at in range(1500, 1532):
            tokens = run(tokens, at)

    return step


# Images.


@program
def resnet50_sgd() -> Step:
    """ResNet-50 of torchvision in single precision, SGD with momentum."""
    from torchvision.models import resnet50

    model = resnet50(weights=None).cuda()
    criterion = nn.CrossEntropyLoss().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    model.train()

    def step() -> None:
        images, labels = torch.randn(64, 3, 224, 224).cuda(), torch.randint(1000, (64,)).cuda()
        loss = criterion(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


@program
def resnet50_channels_last_scaler() -> Step:
    """The same in half precision with a GradScaler, in the layout channels_last."""
    from torchvision.models import resnet50

    model = resnet50(weights=None).to("cuda", memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, nesterov=True)
    scaler = torch.amp.GradScaler("cuda")
    model.train()

    def step() -> None:
        images = torch.randn(96, 3, 224, 224).to("cuda", memory_format=torch.channels_last)
        labels = torch.randint(1000, (96,), device="cuda")
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        scaler.step(optimizer)
        scaler.update()

    return step


@program
def vit_fused_adamw() -> Step:
    """A Vision Transformer of torchvision in bfloat16 by autocast, AdamW fused, mixed images."""
    from torchvision.models import vit_b_16
    from torchvision.transforms import v2

    model = vit_b_16(weights=None, num_classes=1000, dropout=0.1).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    mix = v2.MixUp(num_classes=1000, alpha=0.2)
    model.train()

    def step() -> None:
        images, labels = torch.randn(64, 3, 224, 224, device="cuda"), torch.randint(1000, (64,), device="cuda")
        images, labels = mix(images, labels)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@program
def convnext_pinned_streams() -> Step:
    """ConvNeXt; the next batch is copied from pinned memory on a stream of its own while this one is computed."""
    from torchvision.models import convnext_tiny

    model = convnext_tiny(weights=None, num_classes=100).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.05)
    beside = torch.cuda.Stream()
    waiting: "deque[Tuple[Tensor, Tensor]]" = deque()

    def load() -> None:
        images, labels = torch.randn(48, 3, 224, 224).pin_memory(), torch.randint(100, (48,)).pin_memory()
        with torch.cuda.stream(beside):
            images = images.cuda(non_blocking=True).sub_(0.5).mul_(2)
            waiting.append((images, labels.cuda(non_blocking=True)))

    load()

    def step() -> None:
        torch.cuda.current_stream().wait_stream(beside)
        images, labels = waiting.popleft()
        images.record_stream(torch.cuda.current_stream())
        labels.record_stream(torch.cuda.current_stream())
        load()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


class Residual(nn.Module):
    """Two convolutions with the time between them."""

    def __init__(self, channels: int, out: int, time: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(32, channels), nn.SiLU(), nn.Conv2d(channels, out, 3, padding=1))
        self.time = nn.Linear(time, out)
        self.second = nn.Sequential(
            nn.GroupNorm(32, out), nn.SiLU(), nn.Dropout(0.1), nn.Conv2d(out, out, 3, padding=1)
        )
        self.skip = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return self.skip(x) + self.second(self.first(x) + self.time(F.silu(time))[:, :, None, None])


class Mixing(nn.Module):
    """Attention between the pixels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(32, channels)
        self.split, self.out = nn.Conv2d(channels, 3 * channels, 1), nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        split = self.split(self.norm(x)).view(batch, 3, 4, channels // 4, height * width).transpose(-1, -2)
        mixed = F.scaled_dot_product_attention(*split.unbind(1))
        return x + self.out(mixed.transpose(-1, -2).reshape(x.shape))


class UNet(nn.Module):
    """Three levels, attention on the lower two."""

    def __init__(self, channels: int = 128) -> None:
        super().__init__()
        self.channels, time = channels, 4 * channels
        self.time = nn.Sequential(nn.Linear(channels, time), nn.SiLU(), nn.Linear(time, time))
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.down, self.up, kept, now = nn.ModuleList(), nn.ModuleList(), [channels], channels
        for level, factor in enumerate((1, 2, 2)):
            for _ in range(2):
                mixing = Mixing(channels * factor) if level else nn.Identity()
                self.down.append(nn.ModuleList([Residual(now, channels * factor, time), mixing]))
                now = channels * factor
                kept.append(now)
            if level < 2:
                self.down.append(nn.Conv2d(now, now, 3, 2, 1))
                kept.append(now)
        self.middle = nn.ModuleList([Residual(now, now, time), Mixing(now), Residual(now, now, time)])
        for level, factor in reversed(list(enumerate((1, 2, 2)))):
            for _ in range(3):
                mixing = Mixing(channels * factor) if level else nn.Identity()
                self.up.append(nn.ModuleList([Residual(now + kept.pop(), channels * factor, time), mixing]))
                now = channels * factor
            if level:
                self.up.append(nn.Conv2d(now, now, 3, padding=1))
        self.out = nn.Sequential(nn.GroupNorm(32, now), nn.SiLU(), nn.Conv2d(now, 3, 3, padding=1))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        half = self.channels // 2
        angles = t[:, None].float() * torch.exp(-math.log(10000) * torch.arange(half, device=t.device) / half)[None]
        time = self.time(torch.cat([angles.cos(), angles.sin()], -1))
        x = self.stem(x)
        kept = [x]
        for layer in self.down:
            x = layer(x) if isinstance(layer, nn.Conv2d) else layer[1](layer[0](x, time))
            kept.append(x)
        x = self.middle[2](self.middle[1](self.middle[0](x, time)), time)
        for layer in self.up:
            if isinstance(layer, nn.Conv2d):
                x = layer(F.interpolate(x, scale_factor=2, mode="nearest"))
            else:
                x = layer[1](layer[0](torch.cat([x, kept.pop()], 1), time))
        return self.out(x)


@program
def unet_diffusion() -> Step:
    """Denoising diffusion with a U-Net, an average of its weights, AdamW."""
    import copy

    model = UNet().cuda()
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), 0).cuda()

    def step() -> None:
        images = (torch.rand(24, 3, 64, 64) * 2 - 1).cuda()
        noise, t = torch.randn_like(images), torch.randint(1000, (24,), device="cuda")
        a = alphas[t][:, None, None, None]
        loss = F.mse_loss(model(a.sqrt() * images + (1 - a).sqrt() * noise, t), noise)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            for kept, now in zip(average.parameters(), model.parameters()):
                kept.mul_(0.999).add_(now, alpha=0.001)

    return step


@program
def dcgan() -> Step:
    """Two networks against each other, transposed convolutions, Adam."""

    def up(i: int, o: int, stride: int = 2, padding: int = 1) -> List[nn.Module]:
        return [nn.ConvTranspose2d(i, o, 4, stride, padding, bias=False), nn.BatchNorm2d(o), nn.ReLU(True)]

    def down(i: int, o: int) -> List[nn.Module]:
        return [nn.Conv2d(i, o, 4, 2, 1, bias=False), nn.BatchNorm2d(o), nn.LeakyReLU(0.2, inplace=True)]

    w = 96
    generator = nn.Sequential(
        *up(100, w * 8, 1, 0),
        *up(w * 8, w * 4),
        *up(w * 4, w * 2),
        *up(w * 2, w),
        nn.ConvTranspose2d(w, 3, 4, 2, 1, bias=False),
        nn.Tanh(),
    ).cuda()
    critic = nn.Sequential(
        nn.Conv2d(3, w, 4, 2, 1),
        nn.LeakyReLU(0.2, inplace=True),
        *down(w, w * 2),
        *down(w * 2, w * 4),
        *down(w * 4, w * 8),
        nn.Conv2d(w * 8, 1, 4, bias=False),
        nn.Sigmoid(),
        nn.Flatten(0),
    ).cuda()
    criterion = nn.BCELoss()
    optimizers = [torch.optim.Adam(it.parameters(), lr=2e-4, betas=(0.5, 0.999)) for it in (critic, generator)]

    def step() -> None:
        critic.zero_grad()
        images = torch.rand(512, 3, 64, 64).cuda()
        label = torch.ones(512, device="cuda")
        criterion(critic(images), label).backward()
        made = generator(torch.randn(512, 100, 1, 1, device="cuda"))
        label.fill_(0.0)
        criterion(critic(made.detach()), label).backward()
        optimizers[0].step()
        generator.zero_grad()
        label.fill_(1.0)
        criterion(critic(made), label).backward()
        optimizers[1].step()

    return step


@program
def segmentation() -> Step:
    """DeepLab of torchvision: dilated convolutions, interpolation, a loss for each pixel, polynomial schedule."""
    from torchvision.models.segmentation import deeplabv3_resnet50

    model = deeplabv3_resnet50(weights=None, weights_backbone=None, num_classes=21, aux_loss=True).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    schedule = torch.optim.lr_scheduler.PolynomialLR(optimizer, 100)
    model.train()

    def step() -> None:
        images, labels = torch.randn(8, 3, 320, 320).cuda(), torch.randint(21, (8, 320, 320)).cuda()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            result = model(images)
            loss = sum(
                share * F.cross_entropy(result[name], labels, ignore_index=255)
                for name, share in (("out", 1.0), ("aux", 0.4))
            )
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()

    return step


# Graphs, tables, sounds.


class SAGE(nn.Module):
    """GraphSAGE: the mean of the neighbours."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.own, self.others = nn.Linear(width, out), nn.Linear(width, out, bias=False)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        total = torch.zeros_like(x).index_add_(0, target, x[source])
        count = torch.zeros(len(x), 1, device=x.device).index_add_(
            0, target, torch.ones(len(target), 1, device=x.device)
        )
        return self.own(x) + self.others(total / count.clamp(min=1))


@program
def graphsage() -> Step:
    """A graph of 150,000 nodes and 2.5 million edges as a whole, three layers, Adam."""
    nodes, edges, width = 150_000, 2_500_000, 128
    features = torch.randn(nodes, width).cuda()
    labels = torch.randint(40, (nodes,)).cuda()
    source, target = torch.randint(nodes, (2, edges)).cuda()
    layers = nn.ModuleList([SAGE(width, width), SAGE(width, width), SAGE(width, 40)]).cuda()
    norms = nn.ModuleList([nn.BatchNorm1d(width), nn.BatchNorm1d(width)]).cuda()
    optimizer = torch.optim.Adam([*layers.parameters(), *norms.parameters()], lr=0.01)
    train = torch.randperm(nodes)[: nodes // 2].cuda()

    def step() -> None:
        x = features
        for layer, norm in zip(layers, norms):
            x = F.dropout(F.relu(norm(layer(x, source, target))), 0.5)
        out = layers[2](x, source, target)
        loss = F.cross_entropy(out[train], labels[train])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


@program
def graph_attention() -> Step:
    """Attention over the neighbours, of torch-geometric."""
    from torch_geometric.nn import GATConv

    nodes, edges, width = 60_000, 900_000, 64
    features, labels = torch.randn(nodes, width, device="cuda"), torch.randint(10, (nodes,), device="cuda")
    edge_index = torch.randint(nodes, (2, edges), device="cuda")
    first, second = GATConv(width, 32, heads=4, dropout=0.2).cuda(), GATConv(128, 10, heads=1, concat=False).cuda()
    optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()], lr=0.005, weight_decay=5e-4)

    def step() -> None:
        optimizer.zero_grad()
        x = F.elu(first(features, edge_index))
        loss = F.cross_entropy(second(x, edge_index), labels)
        loss.backward()
        optimizer.step()

    return step


@program
def recommendation() -> Step:
    """DLRM: tables of embeddings in bags, their products with each other, Adagrad."""
    rows = [800_000, 500_000, 400_000, 200_000, 100_000, 50_000, 10_000, 1_000]
    tables = nn.ModuleList(nn.EmbeddingBag(it, 64, mode="sum") for it in rows).cuda()
    bottom = nn.Sequential(nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, 64), nn.ReLU()).cuda()
    top = nn.Sequential(nn.Linear(36 + 64, 1024), nn.ReLU(), nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, 1)).cuda()
    parameters = [*tables.parameters(), *bottom.parameters(), *top.parameters()]
    optimizer = torch.optim.Adagrad(parameters, lr=0.01)
    upper = torch.triu_indices(9, 9, 1).cuda()

    def step() -> None:
        batch = 16384
        dense, label = torch.rand(batch, 13).cuda(), torch.randint(2, (batch,)).float().cuda()
        indices = [torch.randint(it, (batch, 1 + number % 4 * 3)).cuda() for number, it in enumerate(rows)]
        vectors = [bottom(dense), *(table(index) for table, index in zip(tables, indices))]
        stacked = torch.stack(vectors, 1)
        pairs = torch.bmm(stacked, stacked.transpose(1, 2))[:, upper[0], upper[1]]
        logits = top(torch.cat([vectors[0], pairs], 1)).squeeze(1)
        loss = F.binary_cross_entropy_with_logits(logits, label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


@program
def sparse_embeddings() -> Step:
    """Matrix factorization with sparse gradients: SparseAdam for the tables, Adam for the rest."""
    users, items = (nn.Embedding(count, 128, sparse=True).cuda() for count in (1_500_000, 500_000))
    network = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 1)).cuda()
    optimizers = [torch.optim.SparseAdam([users.weight, items.weight], lr=1e-3), torch.optim.Adam(network.parameters())]

    def step() -> None:
        user, item = torch.randint(1_500_000, (65536,)).cuda(), torch.randint(500_000, (65536,)).cuda()
        score = network(torch.cat([users(user), items(item)], 1)).squeeze(1)
        loss = F.mse_loss(score, torch.rand(65536, device="cuda"))
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()

    return step


@program
def speech_lstm_ctc() -> Step:
    """Convolutions over time, four bidirectional LSTM layers, the CTC loss."""
    convolutions = nn.Sequential(nn.Conv1d(80, 512, 5, 2, 2), nn.ReLU(), nn.Conv1d(512, 512, 5, 2, 2), nn.ReLU()).cuda()
    recurrent = nn.LSTM(512, 640, 4, bidirectional=True, batch_first=True, dropout=0.1).cuda()
    last = nn.Linear(1280, 4000).cuda()
    parameters = [*convolutions.parameters(), *recurrent.parameters(), *last.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-4)

    def step() -> None:
        state = convolutions(torch.randn(32, 80, 1200).cuda()).transpose(1, 2)
        guess = last(recurrent(state)[0]).log_softmax(-1).transpose(0, 1)
        text = torch.randint(1, 4000, (32, 60)).cuda()
        loss = F.ctc_loss(guess, text, torch.full((32,), guess.shape[0]), torch.full((32,), 60))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 5.0)
        optimizer.step()

    return step


@program
def whisper_fp16() -> Step:
    """Whisper of transformers: spectra in, text out; half precision with a GradScaler."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        d_model=512,
        encoder_layers=6,
        decoder_layers=6,
        encoder_attention_heads=8,
        decoder_attention_heads=8,
        encoder_ffn_dim=2048,
        decoder_ffn_dim=2048,
        use_cache=False,
    )
    model = WhisperForConditionalGeneration(config).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    scaler = torch.amp.GradScaler()
    model.train()

    def step() -> None:
        spectra = torch.randn(8, 80, 3000, device="cuda")
        labels = torch.randint(50000, (8, 128), device="cuda")
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(input_features=spectra, labels=labels).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step
