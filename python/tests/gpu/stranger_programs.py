"""Programs that the predictions were not made with: written afterwards, each from scratch, in styles that differ.

As `predict_programs.py`: each function makes a model and returns a step. `--programs stranger_programs` of
`predict_truth.py` and `predict_compare.py` runs them. No rule is fitted to what they take.
"""

import math
import os
from copy import deepcopy
from typing import Any, Callable, Dict, List, Optional, Tuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Step = Callable[[], Any]
PROGRAMS: Dict[str, Callable[[], Step]] = {}
device = "cuda"


def program(function: Callable[[], Step]) -> Callable[[], Step]:
    """Registers a program."""
    PROGRAMS[function.__name__] = function
    return function


# A small GPT: tied weights, groups of parameters, accumulated gradients.


class CausalSelfAttention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = self.qkv(x).split(C, dim=2)
        q, k, v = (t.view(B, T, self.heads, C // self.heads).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0, is_causal=True)
        return self.proj(y.transpose(1, 2).contiguous().view(B, T, C))


class GPTBlock(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = CausalSelfAttention(dim, heads)
        self.mlp = nn.Sequential(
            nn.Linear(dim, 4 * dim), nn.GELU(approximate="tanh"), nn.Linear(4 * dim, dim), nn.Dropout(0.1)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, vocab: int, block: int, layers: int, dim: int, heads: int) -> None:
        super().__init__()
        self.wte, self.wpe, self.drop = nn.Embedding(vocab, dim), nn.Embedding(block, dim), nn.Dropout(0.1)
        self.blocks = nn.ModuleList([GPTBlock(dim, heads) for _ in range(layers)])
        self.ln, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x = self.drop(self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device)))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.ln(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1), ignore_index=-1)


@program
def small_gpt() -> Step:
    model = GPT(50304, 1024, 10, 640, 10).to(device)
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=True)

    def step() -> None:
        for _ in range(4):
            data = torch.randint(50257, (6, 1025)).pin_memory().to(device, non_blocking=True)
            with torch.autocast(device_type="cuda", dtype=torch.bfloat16):
                loss = model(data[:, :-1], data[:, 1:]) / 4
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


# A Vision Transformer with nn.MultiheadAttention, checkpoints, a scaler.


class ViTBlock(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, heads, dropout=0.1, batch_first=True)
        self.fc1, self.fc2 = nn.Linear(dim, dim * 4), nn.Linear(dim * 4, dim)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        x = x + self.attn(h, h, h, need_weights=False)[0]
        return x + self.fc2(F.dropout(F.gelu(self.fc1(self.norm2(x))), 0.1, self.training))


class ViT(nn.Module):
    def __init__(self, dim: int = 512, depth: int = 8, heads: int = 8, classes: int = 1000) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 16, 16)
        self.cls = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos = nn.Parameter(torch.randn(1, 197, dim) * 0.02)
        self.blocks = nn.ModuleList(ViTBlock(dim, heads) for _ in range(depth))
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, classes))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.pos
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x[:, 0])


@program
def vit_checkpointing() -> Step:
    model = ViT().cuda()
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    scaler = torch.amp.GradScaler("cuda")

    def step() -> None:
        x, y = torch.rand(128, 3, 224, 224).cuda(), torch.randint(0, 1000, (128,)).cuda()
        lam = 0.7
        perm = torch.randperm(x.size(0), device=x.device)
        mixed = lam * x + (1 - lam) * x[perm]
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = model(mixed)
            loss = lam * F.cross_entropy(out, y) + (1 - lam) * F.cross_entropy(out, y[perm])
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()

    return step


# A ResNet in channels_last with an average of its weights, and a validation pass.


class Bottleneck(nn.Module):
    def __init__(self, cin: int, mid: int, stride: int = 1) -> None:
        super().__init__()
        cout = mid * 4
        self.conv1, self.bn1 = nn.Conv2d(cin, mid, 1, bias=False), nn.BatchNorm2d(mid)
        self.conv2, self.bn2 = nn.Conv2d(mid, mid, 3, stride, 1, bias=False), nn.BatchNorm2d(mid)
        self.conv3, self.bn3 = nn.Conv2d(mid, cout, 1, bias=False), nn.BatchNorm2d(cout)
        self.short: Optional[nn.Module] = None
        if stride != 1 or cin != cout:
            self.short = nn.Sequential(nn.Conv2d(cin, cout, 1, stride, bias=False), nn.BatchNorm2d(cout))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = F.relu(self.bn2(self.conv2(out)), inplace=True)
        out = self.bn3(self.conv3(out))
        out += x if self.short is None else self.short(x)
        return F.relu(out, inplace=True)


def small_resnet(classes: int) -> nn.Module:
    layers: List[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    layers.append(nn.MaxPool2d(3, 2, 1))
    cin = 64
    for mid, count, stride in ((64, 2, 1), (128, 3, 2), (256, 4, 2), (512, 2, 2)):
        for i in range(count):
            layers.append(Bottleneck(cin, mid, stride if i == 0 else 1))
            cin = mid * 4
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(cin, classes))


@program
def resnet_average() -> Step:
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    model = small_resnet(200).to(device=device, memory_format=torch.channels_last)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-5)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    def step() -> None:
        model.train()
        images = torch.randn(80, 3, 192, 192, device=device).contiguous(memory_format=torch.channels_last)
        target = torch.randint(200, (80,), device=device)
        with torch.autocast("cuda", torch.bfloat16):
            loss = criterion(model(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update_parameters(model)
        scheduler.step()
        ema.eval()
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            correct = (ema(images).argmax(1) == target).float().mean()
        print(f"accuracy {correct.item():.3f}")

    return step


# A language model with an LSTM, backward through some of the time.


@program
def lstm_words() -> Step:
    class RNNModel(nn.Module):
        def __init__(self, words: int, width: int, layers: int) -> None:
            super().__init__()
            self.drop, self.encoder = nn.Dropout(0.3), nn.Embedding(words, width)
            self.rnn = nn.LSTM(width, width, layers, dropout=0.3)
            self.decoder = nn.Linear(width, words)
            self.decoder.weight = self.encoder.weight

        def forward(self, tokens: Tensor, hidden: Any) -> Any:
            output, hidden = self.rnn(self.drop(self.encoder(tokens)), hidden)
            return F.log_softmax(self.decoder(self.drop(output)), dim=-1), hidden

    model = RNNModel(33278, 768, 2).cuda()
    hidden = [torch.zeros(2, 64, 768, device="cuda") for _ in range(2)]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step() -> None:
        nonlocal hidden
        text = torch.randint(33278, (71, 64)).cuda()
        hidden = [h.detach() for h in hidden]
        output, hidden = model(text[:-1], tuple(hidden))
        loss = F.nll_loss(output.view(-1, 33278), text[1:].view(-1))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        loss.item()

    return step


# Wasserstein GAN with a penalty on the gradient: backward twice.


@program
def wgan_penalty() -> Step:
    def block(i: int, o: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(i, o, 4, 2, 1), nn.InstanceNorm2d(o, affine=True), nn.LeakyReLU(0.2))

    critic = nn.Sequential(
        nn.Conv2d(3, 64, 4, 2, 1), nn.LeakyReLU(0.2), block(64, 128), block(128, 256), nn.Conv2d(256, 1, 8)
    ).to(device)
    generator = nn.Sequential(
        nn.Linear(128, 256 * 8 * 8),
        nn.Unflatten(1, (256, 8, 8)),
        nn.Upsample(scale_factor=2),
        nn.Conv2d(256, 128, 3, padding=1),
        nn.BatchNorm2d(128),
        nn.ReLU(),
        nn.Upsample(scale_factor=2),
        nn.Conv2d(128, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.Conv2d(64, 3, 3, padding=1),
        nn.Tanh(),
    ).to(device)
    opt_c = torch.optim.Adam(critic.parameters(), lr=1e-4, betas=(0.0, 0.9))
    opt_g = torch.optim.Adam(generator.parameters(), lr=1e-4, betas=(0.0, 0.9))

    def penalty(real: Tensor, fake: Tensor) -> Tensor:
        alpha = torch.rand(real.size(0), 1, 1, 1, device=device)
        between = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
        score = critic(between)
        (grad,) = torch.autograd.grad(score, between, torch.ones_like(score), create_graph=True, retain_graph=True)
        return ((grad.flatten(1).norm(2, dim=1) - 1) ** 2).mean()

    def step() -> None:
        real = torch.randn(256, 3, 64, 64, device=device)
        for _ in range(2):
            with torch.no_grad():
                fake = generator(torch.randn(256, 128, device=device))
            loss = critic(fake).mean() - critic(real).mean() + 10 * penalty(real, fake)
            opt_c.zero_grad()
            loss.backward()
            opt_c.step()
        loss = -critic(generator(torch.randn(256, 128, device=device))).mean()
        opt_g.zero_grad()
        loss.backward()
        opt_g.step()

    return step


# A variational autoencoder in half precision.


@program
def vae_scaler() -> Step:
    class VAE(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            chans = [3, 48, 96, 192, 384]
            self.enc = nn.Sequential(
                *(
                    nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.BatchNorm2d(b), nn.ELU())
                    for a, b in zip(chans, chans[1:])
                )
            )
            self.mu, self.logvar = nn.Linear(384 * 64, 256), nn.Linear(384 * 64, 256)
            self.up = nn.Linear(256, 384 * 64)
            rev = chans[::-1]
            self.dec = nn.Sequential(
                *(
                    nn.Sequential(nn.ConvTranspose2d(a, b, 3, 2, 1, 1), nn.BatchNorm2d(b), nn.ELU())
                    for a, b in zip(rev, rev[1:-1])
                ),
                nn.ConvTranspose2d(48, 3, 3, 2, 1, 1),
            )

        def forward(self, x: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
            h = self.enc(x).flatten(1)
            mu, logvar = self.mu(h), self.logvar(h)
            z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
            return self.dec(self.up(z).view(-1, 384, 8, 8)), mu, logvar

    model = VAE().cuda()
    opt = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")

    def step() -> None:
        x = torch.rand(128, 3, 128, 128).cuda(non_blocking=True)
        with torch.autocast("cuda"):
            recon, mu, logvar = model(x)
        bce = F.binary_cross_entropy_with_logits(recon.float(), x, reduction="sum")
        kld = -0.5 * torch.sum(1 + logvar.float() - mu.float().pow(2) - logvar.float().exp())
        opt.zero_grad()
        scaler.scale((bce + kld) / len(x)).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_value_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()

    return step


# Fine-tuning for classes, with sentences of different lengths and an evaluation.


@program
def distilbert_classes() -> Step:
    from transformers import DistilBertConfig, DistilBertForSequenceClassification, get_cosine_schedule_with_warmup

    model = DistilBertForSequenceClassification(DistilBertConfig(num_labels=4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, weight_decay=0.01)
    schedule = get_cosine_schedule_with_warmup(optimizer, 5, 50)
    lengths = iter([200, 320, 256, 128, 512, 96, 384, 256])

    def batch(length: int) -> Dict[str, Tensor]:
        ids = torch.randint(5, 30522, (24, length))
        mask = (torch.arange(length)[None] < torch.randint(length // 2, length + 1, (24, 1))).long()
        return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}

    def step() -> None:
        model.train()
        for _ in range(2):
            out = model(**batch(next(lengths)), labels=torch.randint(4, (24,)).to(device))
            out.loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            logits = model(**batch(384)).logits
            print((logits.argmax(-1) == 1).sum().item())

    return step


# Low-rank additions to a frozen GPT-NeoX with gradient checkpointing.


@program
def neox_lora_checkpointing() -> Step:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    class LoRALinear(nn.Module):
        def __init__(self, inner: nn.Linear, r: int = 8) -> None:
            super().__init__()
            self.inner = inner
            self.a = nn.Linear(inner.in_features, r, bias=False, dtype=torch.bfloat16)
            self.b = nn.Linear(r, inner.out_features, bias=False, dtype=torch.bfloat16)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) + self.b(self.a(x)) * 2.0

    config = GPTNeoXConfig(
        hidden_size=1024,
        num_hidden_layers=12,
        num_attention_heads=16,
        intermediate_size=4096,
        vocab_size=50432,
        use_cache=False,
    )
    model = GPTNeoXForCausalLM(config).to(torch.bfloat16)
    for p in model.parameters():
        p.requires_grad = False
    for layer in model.gpt_neox.layers:
        layer.attention.query_key_value = LoRALinear(layer.attention.query_key_value)
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    model.to(device)
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, foreach=False)

    def step() -> None:
        for _ in range(2):
            ids = torch.randint(50000, (4, 1536), device=device)
            model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


# Generation with a cache that grows, top-k and top-p by hand.


@program
def sampling_by_hand() -> Step:
    dim, heads, layers, vocab = 1536, 12, 14, 48000

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.n1, self.n2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
            self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))
            self.gate, self.upw, self.down = nn.Linear(dim, 4096), nn.Linear(dim, 4096), nn.Linear(4096, dim)

        def forward(self, x: Tensor, past: Optional[Tuple[Tensor, Tensor]]) -> Tuple[Tensor, Tuple[Tensor, Tensor]]:
            b, t, _ = x.shape
            h = self.n1(x)
            q, k, v = (f(h).view(b, t, heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
            if past is not None:
                k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
            a = F.scaled_dot_product_attention(q, k, v, is_causal=past is None)
            x = x + self.o(a.transpose(1, 2).reshape(b, t, dim))
            h = self.n2(x)
            return x + self.down(F.silu(self.gate(h)) * self.upw(h)), (k, v)

    embed = nn.Embedding(vocab, dim).half().to(device)
    stack = nn.ModuleList(Layer() for _ in range(layers)).half().to(device).eval()
    head = nn.Linear(dim, vocab, bias=False).half().to(device)

    @torch.inference_mode()
    def step() -> None:
        tokens = torch.randint(vocab, (24, 700), device=device)
        past: List[Any] = [None] * layers
        x = tokens
        for _ in range(20):
            h = embed(x)
            for i, layer in enumerate(stack):
                h, past[i] = layer(h, past[i])
            logits = head(h[:, -1]).float() / 0.9
            values, _ = torch.topk(logits, 200)
            logits[logits < values[:, [-1]]] = -float("inf")
            ordered, order = torch.sort(logits, descending=True)
            drop = ordered.softmax(-1).cumsum(-1) > 0.9
            drop[:, 1:] = drop[:, :-1].clone()
            drop[:, 0] = False
            logits = logits.masked_fill(drop.scatter(1, order, drop), -float("inf"))
            x = torch.multinomial(logits.softmax(-1), 1)
            tokens = torch.cat([tokens, x], 1)

    return step


# A diffusion model: another U-Net, of 96 channels, with images sampled between the steps.


class ResBlock(nn.Module):
    def __init__(self, cin: int, cout: int, emb: int) -> None:
        super().__init__()
        self.n1, self.c1 = nn.GroupNorm(8, cin), nn.Conv2d(cin, cout, 3, padding=1)
        self.n2, self.c2 = nn.GroupNorm(8, cout), nn.Conv2d(cout, cout, 3, padding=1)
        self.e = nn.Linear(emb, cout * 2)
        self.s = nn.Conv2d(cin, cout, 1) if cin != cout else None

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        h = self.c1(F.silu(self.n1(x)))
        scale, shift = self.e(emb)[..., None, None].chunk(2, 1)
        h = self.c2(F.silu(self.n2(h) * (1 + scale) + shift))
        return h + (x if self.s is None else self.s(x))


class Denoiser(nn.Module):
    def __init__(self, base: int = 96) -> None:
        super().__init__()
        self.emb = nn.Sequential(nn.Linear(64, 256), nn.SiLU(), nn.Linear(256, 256))
        self.labels = nn.Embedding(11, 256)
        self.first = nn.Conv2d(3, base, 3, padding=1)
        widths = [base, base * 2, base * 3]
        self.downs, self.ups = nn.ModuleList(), nn.ModuleList()
        cur = base
        for w in widths:
            self.downs.append(nn.ModuleList([ResBlock(cur, w, 256), ResBlock(w, w, 256), nn.AvgPool2d(2)]))
            cur = w
        self.mid1, self.mid2 = ResBlock(cur, cur, 256), ResBlock(cur, cur, 256)
        self.attn = nn.MultiheadAttention(cur, 6, batch_first=True)
        for w in reversed(widths):
            up = nn.Upsample(scale_factor=2, mode="nearest")
            self.ups.append(nn.ModuleList([up, ResBlock(cur + w, w, 256), ResBlock(w, w, 256)]))
            cur = w
        self.last = nn.Conv2d(cur, 3, 1)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        freqs = torch.exp(-math.log(1e4) * torch.arange(32, device=x.device) / 32)
        angle = t[:, None] * freqs[None]
        emb = self.emb(torch.cat([angle.sin(), angle.cos()], 1)) + self.labels(y)
        x = self.first(x)
        skips = []
        for a, b, pool in self.downs:
            x = b(a(x, emb), emb)
            skips.append(x)
            x = pool(x)
        x = self.mid1(x, emb)
        seq = x.flatten(2).transpose(1, 2)
        x = x + self.attn(seq, seq, seq)[0].transpose(1, 2).reshape(x.shape)
        x = self.mid2(x, emb)
        for up, a, b in self.ups:
            x = b(a(torch.cat([up(x), skips.pop()], 1), emb), emb)
        return self.last(x)


@program
def denoiser_guidance() -> Step:
    model = Denoiser().to(device)
    ema = deepcopy(model).eval().requires_grad_(False)
    opt = torch.optim.Adam(model.parameters(), lr=1e-4)
    betas = torch.linspace(1e-4, 0.02, 1000, device=device)
    abar = torch.cumprod(1 - betas, 0)

    def step() -> None:
        x = torch.randn(40, 3, 64, 64).to(device)
        y = torch.randint(0, 10, (40,)).to(device)
        y = torch.where(torch.rand(40, device=device) < 0.1, torch.full_like(y, 10), y)
        t = torch.randint(0, 1000, (40,), device=device)
        noise = torch.randn_like(x)
        w = abar[t].view(-1, 1, 1, 1)
        loss = F.mse_loss(model(w.sqrt() * x + (1 - w).sqrt() * noise, t, y), noise)
        opt.zero_grad()
        loss.backward()
        opt.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(ema.parameters()), list(model.parameters()), 0.01)
            img = torch.randn(8, 3, 64, 64, device=device)
            for i in range(999, 0, -333):
                tt = torch.full((8,), i, device=device)
                a, b = ema(img, tt, torch.full_like(tt, 3)), ema(img, tt, torch.full_like(tt, 10))
                eps = b + 3.0 * (a - b)
                img = (img - betas[i] / (1 - abar[i]).sqrt() * eps) / (1 - betas[i]).sqrt()

    return step


# Two towers of images and texts.


@program
def two_towers() -> Step:
    class Clip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.visual = small_resnet(512)
            layer = nn.TransformerEncoderLayer(512, 8, 2048, activation="gelu", batch_first=True, norm_first=True)
            self.words, self.places = nn.Embedding(49408, 512), nn.Parameter(torch.randn(77, 512) * 0.01)
            self.text = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
            self.scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

        def forward(self, image: Tensor, text: Tensor) -> Tensor:
            v = F.normalize(self.visual(image), dim=-1)
            h = self.text(self.words(text) + self.places, src_key_padding_mask=text == 0)
            t = F.normalize(h[torch.arange(len(text), device=text.device), text.argmax(-1)], dim=-1)
            return self.scale.exp() * v @ t.t()

    model = Clip().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.2, eps=1e-6)

    def step() -> None:
        image = torch.rand(128, 3, 160, 160).cuda()
        text = torch.randint(1, 49000, (128, 77))
        text[:, 50:] = 0
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(image, text.cuda())
            labels = torch.arange(128, device="cuda")
            loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            model.scale.clamp_(0, math.log(100))

    return step


# Points in space, each with its neighbours.


@program
def point_cloud() -> Step:
    def neighbours(x: Tensor, k: int) -> Tensor:
        inner = -2 * torch.matmul(x.transpose(2, 1), x)
        square = torch.sum(x**2, dim=1, keepdim=True)
        return (-square - inner - square.transpose(2, 1)).topk(k=k, dim=-1)[1]

    def edges(x: Tensor, k: int = 16) -> Tensor:
        b, c, n = x.shape
        idx = (neighbours(x, k) + torch.arange(b, device=x.device).view(-1, 1, 1) * n).view(-1)
        x = x.transpose(2, 1).contiguous()
        near = x.view(b * n, c)[idx].view(b, n, k, c)
        own = x.view(b, n, 1, c).repeat(1, 1, k, 1)
        return torch.cat((near - own, own), dim=3).permute(0, 3, 1, 2).contiguous()

    class DGCNN(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = ((6, 64), (128, 64), (128, 128))
            self.convs = nn.ModuleList(
                nn.Sequential(nn.Conv2d(i, o, 1, bias=False), nn.BatchNorm2d(o), nn.LeakyReLU(0.2)) for i, o in sizes
            )
            self.last = nn.Sequential(nn.Conv1d(256, 512, 1, bias=False), nn.BatchNorm1d(512), nn.LeakyReLU(0.2))
            self.head = nn.Sequential(nn.Linear(1024, 256), nn.BatchNorm1d(256), nn.Dropout(0.5), nn.Linear(256, 40))

        def forward(self, x: Tensor) -> Tensor:
            kept = []
            for conv in self.convs:
                x = conv(edges(x)).max(dim=-1)[0]
                kept.append(x)
            x = self.last(torch.cat(kept, 1))
            return self.head(torch.cat([F.adaptive_max_pool1d(x, 1), F.adaptive_avg_pool1d(x, 1)], 1).squeeze(-1))

    model = DGCNN().to(device)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step() -> None:
        points, label = torch.randn(24, 3, 1024).to(device), torch.randint(40, (24,)).to(device)
        opt.zero_grad()
        F.cross_entropy(model(points), label).backward()
        opt.step()

    return step


# Proximal policy optimization: frames as bytes, rollouts without gradients, several small batches.


@program
def policy_frames() -> Step:
    trunk = nn.Sequential(
        *(nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(3136, 512), nn.ReLU()),
    ).to(device)
    actor, critic = nn.Linear(512, 18).to(device), nn.Linear(512, 1).to(device)
    params = [*trunk.parameters(), *actor.parameters(), *critic.parameters()]
    optimizer = torch.optim.Adam(params, lr=2.5e-4, eps=1e-5)
    steps, envs = 16, 512

    def step() -> None:
        frames = torch.zeros((steps, envs, 4, 84, 84), dtype=torch.uint8, device=device)
        actions, logps = torch.zeros(steps, envs, device=device).long(), torch.zeros(steps, envs, device=device)
        rewards, values = torch.zeros(steps, envs, device=device), torch.zeros(steps + 1, envs, device=device)
        for t in range(steps):
            frames[t] = torch.randint(0, 256, (envs, 4, 84, 84), dtype=torch.uint8).to(device)
            with torch.no_grad():
                h = trunk(frames[t].float() / 255.0)
                logits = actor(h)
                probs = F.softmax(logits, -1)
                actions[t] = torch.multinomial(probs, 1).squeeze(1)
                logps[t] = torch.log_softmax(logits, -1).gather(1, actions[t][:, None]).squeeze(1)
                values[t] = critic(h).squeeze(-1)
            rewards[t] = torch.rand(envs).to(device)
        advantages, last = torch.zeros_like(rewards), torch.zeros(envs, device=device)
        for t in reversed(range(steps)):
            delta = rewards[t] + 0.99 * values[t + 1] - values[t]
            last = delta + 0.99 * 0.95 * last
            advantages[t] = last
        flat = frames.view(-1, 4, 84, 84)
        order = torch.randperm(steps * envs, device=device)
        for begin in range(0, steps * envs, 2048):
            index = order[begin : begin + 2048]
            h = trunk(flat[index].float() / 255.0)
            logp = torch.log_softmax(actor(h), -1)
            chosen = logp.gather(1, actions.view(-1)[index][:, None]).squeeze(1)
            ratio = (chosen - logps.view(-1)[index]).exp()
            adv = advantages.view(-1)[index]
            adv = (adv - adv.mean()) / (adv.std() + 1e-8)
            policy = -torch.min(adv * ratio, adv * torch.clamp(ratio, 0.9, 1.1)).mean()
            value = 0.5 * ((critic(h).squeeze(-1) - (adv + values[:-1].reshape(-1)[index])) ** 2).mean()
            entropy = -(logp.exp() * logp).sum(-1).mean()
            optimizer.zero_grad()
            (policy + 0.5 * value - 0.01 * entropy).backward()
            nn.utils.clip_grad_norm_(params, 0.5)
            optimizer.step()

    return step


# Short films, by convolutions in three dimensions.


@program
def films() -> Step:
    def conv(i: int, o: int, stride: Any = 1) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv3d(i, o, 3, stride, 1, bias=False), nn.BatchNorm3d(o), nn.ReLU(inplace=True)
        )

    model = nn.Sequential(
        *(nn.Conv3d(3, 32, (3, 7, 7), (1, 2, 2), (1, 3, 3), bias=False), nn.BatchNorm3d(32), nn.ReLU(inplace=True)),
        *(conv(32, 64), nn.MaxPool3d(2), conv(64, 128), conv(128, 128, 2), conv(128, 256), conv(256, 256, 2)),
        *(nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Dropout(0.5), nn.Linear(256, 400)),
    ).to(device)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4)

    def step() -> None:
        clips, labels = torch.randn(8, 3, 16, 112, 112).to(device), torch.randint(400, (8,)).to(device)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(clips), labels)
        loss.backward()
        opt.step()
        opt.zero_grad()

    return step
