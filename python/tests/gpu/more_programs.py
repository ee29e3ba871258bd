"""More programs that record a memory snapshot and write down what each tensor is, as `snapshots.py` does:
`python more_programs.py FOLDER [PROGRAM ...]`.

They were written without knowledge of the rules in `crates/trace/src/category`. What a tensor is, is written down as in
`snapshots.py`. In addition: copies of parameters that are kept (averages, teachers, momentum encoders, the parameters
that FSDP gathers) are parameters; gradients of single samples are gradients; what the loop makes as data (noise,
timesteps, mixed images, masks) is input; caches of keys and values, and what the program keeps of its results, are
activations.
"""

import copy
import math
import os
import queue
import subprocess
import sys
import tempfile
import threading
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

import snapshots as base
from snapshots import Truth, program

GIB = 1 << 30
BEFORE = set(base.PROGRAMS)


# Shared by the programs: how tensors are recorded.


def tensors(tree: Any) -> List[Tensor]:
    """The tensors in lists, tuples, dictionaries and the outputs of models."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict) or hasattr(tree, "items"):
        return [it for value in tree.values() for it in tensors(value)]
    if isinstance(tree, (list, tuple, set)):
        return [it for value in tree for it in tensors(value)]
    return []


def fixed(truth: Truth, model: nn.Module) -> None:
    """Parameters and buffers of a model that is not trained."""
    truth.label("parameters", [*model.parameters(), *model.buffers()])


def limit(gibibytes: float) -> None:
    """This process may use only so much of the device."""
    torch.cuda.set_per_process_memory_fraction(gibibytes * GIB / torch.cuda.get_device_properties(0).total_memory)


# Diffusion.


def timestep_embedding(t: Tensor, dim: int) -> Tensor:
    freqs = torch.exp(-math.log(10000) * torch.arange(dim // 2, device=t.device) / (dim // 2))
    args = t[:, None].float() * freqs[None]
    return torch.cat([args.cos(), args.sin()], dim=-1)


class ResBlock(nn.Module):
    def __init__(self, in_ch: int, out_ch: int, emb_dim: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(32, in_ch)
        self.conv1 = nn.Conv2d(in_ch, out_ch, 3, padding=1)
        self.emb = nn.Linear(emb_dim, out_ch)
        self.norm2 = nn.GroupNorm(32, out_ch)
        self.dropout = nn.Dropout(0.1)
        self.conv2 = nn.Conv2d(out_ch, out_ch, 3, padding=1)
        self.skip = nn.Conv2d(in_ch, out_ch, 1) if in_ch != out_ch else nn.Identity()

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.emb(F.silu(emb))[:, :, None, None]
        h = self.conv2(self.dropout(F.silu(self.norm2(h))))
        return h + self.skip(x)


class SelfAttention2d(nn.Module):
    def __init__(self, ch: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(32, ch)
        self.qkv = nn.Conv2d(ch, ch * 3, 1)
        self.proj = nn.Conv2d(ch, ch, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(b, 3, self.heads, c // self.heads, h * w).transpose(-1, -2).unbind(1)
        out = F.scaled_dot_product_attention(q, k, v)
        return x + self.proj(out.transpose(-1, -2).reshape(b, c, h, w))


class UNet(nn.Module):
    def __init__(
        self, ch: int = 96, mults: Tuple[int, ...] = (1, 2, 3), attention_at: Tuple[int, ...] = (1, 2)
    ) -> None:
        super().__init__()
        emb_dim = ch * 4
        self.ch = ch
        self.time_mlp = nn.Sequential(nn.Linear(ch, emb_dim), nn.SiLU(), nn.Linear(emb_dim, emb_dim))
        self.stem = nn.Conv2d(3, ch, 3, padding=1)
        self.downs, self.ups = nn.ModuleList(), nn.ModuleList()
        widths, current = [ch], ch
        for level, mult in enumerate(mults):
            for _ in range(2):
                attention = SelfAttention2d(ch * mult) if level in attention_at else nn.Identity()
                self.downs.append(nn.ModuleList([ResBlock(current, ch * mult, emb_dim), attention]))
                current = ch * mult
                widths.append(current)
            if level + 1 < len(mults):
                self.downs.append(nn.Conv2d(current, current, 3, stride=2, padding=1))
                widths.append(current)
        self.mid1, self.mid_attention = ResBlock(current, current, emb_dim), SelfAttention2d(current)
        self.mid2 = ResBlock(current, current, emb_dim)
        for level, mult in reversed(list(enumerate(mults))):
            for _ in range(3):
                attention = SelfAttention2d(ch * mult) if level in attention_at else nn.Identity()
                self.ups.append(nn.ModuleList([ResBlock(current + widths.pop(), ch * mult, emb_dim), attention]))
                current = ch * mult
            if level:
                self.ups.append(nn.Conv2d(current, current, 3, padding=1))
        self.out = nn.Sequential(nn.GroupNorm(32, current), nn.SiLU(), nn.Conv2d(current, 3, 3, padding=1))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        emb = self.time_mlp(timestep_embedding(t, self.ch))
        h = self.stem(x)
        skips = [h]
        for layer in self.downs:
            if isinstance(layer, nn.Conv2d):
                h = layer(h)
            else:
                h = layer[1](layer[0](h, emb))
            skips.append(h)
        h = self.mid2(self.mid_attention(self.mid1(h, emb)), emb)
        for layer in self.ups:
            if isinstance(layer, nn.Conv2d):
                h = layer(F.interpolate(h, scale_factor=2, mode="nearest"))
            else:
                h = layer[1](layer[0](torch.cat([h, skips.pop()], dim=1), emb))
        return self.out(h)


@torch.no_grad()
def update_ema(ema: nn.Module, model: nn.Module, decay: float = 0.999) -> None:
    for average, parameter in zip(ema.parameters(), model.parameters()):
        average.mul_(decay).add_(parameter, alpha=1 - decay)


@program("diffusion")
def diffusion(truth: Truth) -> None:
    """Denoising diffusion: a U-Net with attention, an average of its weights, noise, and some samples at the end."""
    device = torch.device("cuda")
    model = UNet().to(device)
    ema = copy.deepcopy(model).eval().requires_grad_(False)
    truth.model(model)
    fixed(truth, ema)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-4, weight_decay=0.0)
    betas = torch.linspace(1e-4, 0.02, 1000)
    alphas_cumprod = torch.cumprod(1 - betas, dim=0).to(device)
    truth.label("inputs", [alphas_cumprod])
    for _ in range(3):
        x0 = (torch.rand(16, 3, 64, 64) * 2 - 1).to(device)
        noise = torch.randn_like(x0)
        t = torch.randint(0, 1000, (x0.shape[0],), device=device)
        a = alphas_cumprod[t][:, None, None, None]
        x_t = a.sqrt() * x0 + (1 - a).sqrt() * noise
        truth.label("inputs", [x0, noise, t, a, x_t])
        with truth.saving():
            pred = model(x_t, t)
            loss = F.mse_loss(pred, noise)
        truth.label("activations", [pred, loss])
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        truth.optimizer(opt)
        update_ema(ema, model)
    with torch.no_grad():
        x = torch.randn(8, 3, 64, 64, device=device)
        truth.label("inputs", [x])
        for step in (600, 300):
            steps = torch.full((8,), step, device=device)
            truth.label("inputs", [steps])
            x = x - 0.1 * ema(x, steps)
            truth.label("activations", [x])


program("diffusion_python", stacks="python")(diffusion)


# Adversaries.


def weights_init(m: nn.Module) -> None:
    classname = m.__class__.__name__
    if classname.find("Conv") != -1:
        nn.init.normal_(m.weight.data, 0.0, 0.02)
    elif classname.find("BatchNorm") != -1:
        nn.init.normal_(m.weight.data, 1.0, 0.02)
        nn.init.constant_(m.bias.data, 0)


@program("gan")
def gan(truth: Truth) -> None:
    """DCGAN as in the tutorial: two optimizers, and the images of the generator without their graph."""
    device = torch.device("cuda:0")
    nz, ngf, ndf, batch_size = 100, 96, 96, 384
    netG = nn.Sequential(
        nn.ConvTranspose2d(nz, ngf * 8, 4, 1, 0, bias=False),
        nn.BatchNorm2d(ngf * 8),
        nn.ReLU(True),
        nn.ConvTranspose2d(ngf * 8, ngf * 4, 4, 2, 1, bias=False),
        nn.BatchNorm2d(ngf * 4),
        nn.ReLU(True),
        nn.ConvTranspose2d(ngf * 4, ngf * 2, 4, 2, 1, bias=False),
        nn.BatchNorm2d(ngf * 2),
        nn.ReLU(True),
        nn.ConvTranspose2d(ngf * 2, ngf, 4, 2, 1, bias=False),
        nn.BatchNorm2d(ngf),
        nn.ReLU(True),
        nn.ConvTranspose2d(ngf, 3, 4, 2, 1, bias=False),
        nn.Tanh(),
    ).to(device)
    netD = nn.Sequential(
        nn.Conv2d(3, ndf, 4, 2, 1, bias=False),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(ndf, ndf * 2, 4, 2, 1, bias=False),
        nn.BatchNorm2d(ndf * 2),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(ndf * 2, ndf * 4, 4, 2, 1, bias=False),
        nn.BatchNorm2d(ndf * 4),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(ndf * 4, ndf * 8, 4, 2, 1, bias=False),
        nn.BatchNorm2d(ndf * 8),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(ndf * 8, 1, 4, 1, 0, bias=False),
        nn.Sigmoid(),
    ).to(device)
    netG.apply(weights_init)
    netD.apply(weights_init)
    truth.model(netG)
    truth.model(netD)
    criterion = nn.BCELoss()
    fixed_noise = torch.randn(64, nz, 1, 1, device=device)
    truth.label("inputs", [fixed_noise])
    optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
    img_list = []
    for i in range(6):
        # (1) Update D network: maximize log(D(x)) + log(1 - D(G(z)))
        netD.zero_grad()
        real = torch.rand(batch_size, 3, 64, 64).to(device)
        label = torch.full((batch_size,), 1.0, dtype=torch.float, device=device)
        noise = torch.randn(batch_size, nz, 1, 1, device=device)
        truth.label("inputs", [real, label, noise])
        with truth.saving():
            output = netD(real).view(-1)
            errD_real = criterion(output, label)
        truth.label("activations", [output, errD_real])
        errD_real.backward()
        with truth.saving():
            fake = netG(noise)
            truth.label("activations", [fake])
            label.fill_(0.0)
            output = netD(fake.detach()).view(-1)
            errD_fake = criterion(output, label)
        truth.label("activations", [output, errD_fake])
        errD_fake.backward()
        errD = errD_real + errD_fake
        truth.label("activations", [errD])
        optimizerD.step()
        truth.optimizer(optimizerD)
        # (2) Update G network: maximize log(D(G(z)))
        netG.zero_grad()
        label.fill_(1.0)
        with truth.saving():
            output = netD(fake).view(-1)
            errG = criterion(output, label)
        truth.label("activations", [output, errG])
        errG.backward()
        optimizerG.step()
        truth.optimizer(optimizerG)
        if i % 3 == 2:
            with torch.no_grad():
                img_list.append(netG(fixed_noise).detach().cpu())


# Images.


@program("vit_mixup")
def vit_mixup(truth: Truth) -> None:
    """A Vision Transformer of torchvision with mixed images, smooth labels, and SGD with Nesterov momentum."""
    from torchvision.models import vit_b_16
    from torchvision.transforms import v2

    model = vit_b_16(weights=None, num_classes=1000, dropout=0.1).cuda()
    truth.model(model)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4, nesterov=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    mixup = v2.MixUp(num_classes=1000, alpha=0.2)
    model.train()
    for _ in range(4):
        images = torch.randn(32, 3, 224, 224).cuda(non_blocking=True)
        target = torch.randint(1000, (32,)).cuda(non_blocking=True)
        truth.label("inputs", [images, target])
        images, target = mixup(images, target)
        truth.label("inputs", [images, target])
        with truth.saving():
            output = model(images)
            loss = criterion(output, target)
        truth.label("activations", [output, loss])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        truth.optimizer(optimizer)


def detection_targets(image: Tensor, count: int, masks: bool) -> Dict[str, Tensor]:
    height, width = image.shape[-2:]
    corner = torch.rand(count, 2) * torch.tensor([width * 0.6, height * 0.6])
    size = torch.rand(count, 2) * torch.tensor([width * 0.3, height * 0.3]) + 8
    boxes = torch.cat([corner, corner + size], dim=1)
    target = {"boxes": boxes, "labels": torch.randint(1, 91, (count,))}
    if masks:
        grid_y, grid_x = torch.arange(height)[None, :, None], torch.arange(width)[None, None, :]
        x1, y1, x2, y2 = (it[:, None, None] for it in boxes.unbind(1))
        target["masks"] = ((grid_x >= x1) & (grid_x < x2) & (grid_y >= y1) & (grid_y < y2)).to(torch.uint8)
    return target


def detection(truth: Truth, model: nn.Module, steps: int, batch: int, masks: bool) -> None:
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    model.to(device)
    truth.model(model)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(params, lr=0.001, momentum=0.9, weight_decay=0.0005)
    model.train()
    sizes = torch.Generator().manual_seed(7)
    for _ in range(steps):
        images, targets = [], []
        for _ in range(batch):
            height, width = (int(it) for it in torch.randint(380, 560, (2,), generator=sizes))
            images.append(torch.rand(3, height, width))
            targets.append(detection_targets(images[-1], int(torch.randint(1, 9, (1,), generator=sizes)), masks))
        images = [image.to(device) for image in images]
        targets = [{k: v.to(device) for k, v in t.items()} for t in targets]
        truth.label("inputs", tensors([images, targets]))
        with truth.saving():
            loss_dict = model(images, targets)
            losses = sum(loss for loss in loss_dict.values())
        truth.label("activations", [*loss_dict.values(), losses])
        optimizer.zero_grad()
        losses.backward()
        optimizer.step()
        truth.optimizer(optimizer)


@program("mask_rcnn")
def mask_rcnn(truth: Truth) -> None:
    """Instance segmentation of torchvision: images of different sizes, boxes, masks."""
    from torchvision.models.detection import maskrcnn_resnet50_fpn

    model = maskrcnn_resnet50_fpn(weights=None, weights_backbone=None, num_classes=91, min_size=480, max_size=720)
    detection(truth, model, steps=2, batch=4, masks=True)


@program("retinanet")
def retinanet(truth: Truth) -> None:
    """Boxes by RetinaNet; then some predictions."""
    from torchvision.models.detection import retinanet_resnet50_fpn

    model = retinanet_resnet50_fpn(weights=None, weights_backbone=None, num_classes=91, min_size=512, max_size=768)
    detection(truth, model, steps=3, batch=4, masks=False)
    model.eval()
    with torch.no_grad():
        images = [torch.rand(3, 480, 512, device="cuda")]
        truth.label("inputs", images)
        found = model(images)
        truth.label("activations", tensors(found))


class RandomImages(Dataset):
    def __init__(self, length: int, size: int, classes: int) -> None:
        self.length, self.size, self.classes = length, size, classes

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, self.size, self.size, generator=generator), index % self.classes


@program("loader_pinned")
def loader_pinned(truth: Truth) -> None:
    """ConvNeXt from a loader with two workers and pinned memory, and a validation after each epoch."""
    from torchvision.models import convnext_tiny

    device = "cuda"
    train_loader = DataLoader(
        RandomImages(96, 224, 100),
        batch_size=48,
        shuffle=True,
        num_workers=2,
        pin_memory=True,
        drop_last=True,
        persistent_workers=True,
    )
    val_loader = DataLoader(RandomImages(48, 224, 100), batch_size=48, num_workers=2, pin_memory=True)
    model = convnext_tiny(weights=None, num_classes=100).to(device)
    truth.model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.05)
    scaler = torch.amp.GradScaler("cuda")
    criterion = nn.CrossEntropyLoss().to(device)
    for epoch in range(2):
        model.train()
        for images, labels in train_loader:
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            truth.label("inputs", [images, labels])
            with torch.autocast(device_type="cuda", dtype=torch.float16), truth.saving():
                logits = model(images)
                loss = criterion(logits, labels)
            truth.label("activations", [logits, loss])
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            truth.optimizer(optimizer)
        model.eval()
        correct = 0
        with torch.no_grad():
            for images, labels in val_loader:
                images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
                truth.label("inputs", [images, labels])
                with torch.autocast(device_type="cuda", dtype=torch.float16):
                    logits = model(images)
                truth.label("activations", [logits])
                correct += (logits.argmax(dim=1) == labels).sum().item()


@program("prefetch_thread")
def prefetch_thread(truth: Truth) -> None:
    """A thread copies the next batches on its own stream while the model, in DataParallel, goes backward."""
    from torchvision.models import wide_resnet50_2

    model = nn.DataParallel(wide_resnet50_2(weights=None, num_classes=365), device_ids=[0]).cuda()
    truth.model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-5)
    batches: "queue.Queue[Optional[Tuple[Tensor, Tensor, Any]]]" = queue.Queue(maxsize=2)

    def prefetch() -> None:
        stream = torch.cuda.Stream()
        for step in range(6):
            size = 40 + 8 * (step % 2)
            images, labels = torch.randn(size, 3, 224, 224).pin_memory(), torch.randint(365, (size,)).pin_memory()
            with torch.cuda.stream(stream):
                images, labels = images.cuda(non_blocking=True), labels.cuda(non_blocking=True)
                truth.label("inputs", [images, labels])
                copied = torch.cuda.Event()
                copied.record(stream)
            batches.put((images, labels, copied))
            del images, labels
        batches.put(None)

    thread = threading.Thread(target=prefetch, daemon=True)
    thread.start()
    while True:
        item = batches.get()
        if item is None:
            break
        images, labels, copied = item
        del item
        copied.wait()
        images.record_stream(torch.cuda.current_stream())
        labels.record_stream(torch.cuda.current_stream())
        optimizer.zero_grad()
        with truth.saving():
            out = model(images)
            loss = F.cross_entropy(out, labels)
        truth.label("activations", [out, loss])
        loss.backward()
        optimizer.step()
        truth.optimizer(optimizer)
    thread.join()


@program("validation_leak")
def validation_leak(truth: Truth) -> None:
    """The validation forgets no_grad, and the list of its losses keeps every graph."""
    from torchvision.models import efficientnet_b0

    device = torch.device("cuda")
    model = efficientnet_b0(weights=None, num_classes=200).to(device)
    truth.model(model)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.9, alpha=0.9, eps=1e-3)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(1):
        model.train()
        for _ in range(2):
            x, y = torch.randn(12, 3, 192, 192).to(device), torch.randint(200, (12,)).to(device)
            truth.label("inputs", [x, y])
            optimizer.zero_grad()
            with truth.saving():
                pred = model(x)
                loss = criterion(pred, y)
            truth.label("activations", [pred, loss])
            loss.backward()
            optimizer.step()
            truth.optimizer(optimizer)
        model.eval()
        val_losses = []
        for _ in range(4):
            x, y = torch.randn(12, 3, 192, 192).to(device), torch.randint(200, (12,)).to(device)
            truth.label("inputs", [x, y])
            with truth.saving():
                pred = model(x)
                loss = criterion(pred, y)
            truth.label("activations", [pred, loss])
            val_losses.append(loss)
        mean = sum(val_losses) / len(val_losses)
        truth.label("activations", [mean])
        print(f"epoch {epoch}: validation loss {mean:.3f}")


@program("momentum_encoder")
def momentum_encoder(truth: Truth) -> None:
    """Contrastive learning (MoCo): an encoder that follows the other, and a queue of keys that is kept."""
    from torchvision.models import resnet34

    class MoCo(nn.Module):
        def __init__(self, dim: int = 256, size: int = 65536) -> None:
            super().__init__()
            self.encoder_q, self.encoder_k = resnet34(num_classes=dim), resnet34(num_classes=dim)
            for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters()):
                k.data.copy_(q.data)
                k.requires_grad = False
            self.register_buffer("queue", F.normalize(torch.randn(dim, size), dim=0))
            self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

        @torch.no_grad()
        def _momentum_update(self) -> None:
            for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters()):
                k.data = k.data * 0.999 + q.data * 0.001
            truth.label("parameters", self.encoder_k.parameters())

        @torch.no_grad()
        def _dequeue_and_enqueue(self, keys: Tensor) -> None:
            ptr = int(self.queue_ptr)
            self.queue[:, ptr : ptr + keys.shape[0]] = keys.T
            self.queue_ptr[0] = (ptr + keys.shape[0]) % self.queue.shape[1]

        def forward(self, im_q: Tensor, im_k: Tensor) -> Tuple[Tensor, Tensor]:
            q = F.normalize(self.encoder_q(im_q), dim=1)
            with torch.no_grad():
                self._momentum_update()
                k = F.normalize(self.encoder_k(im_k), dim=1)
            l_pos = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
            l_neg = torch.einsum("nc,ck->nk", [q, self.queue.clone().detach()])
            logits = torch.cat([l_pos, l_neg], dim=1) / 0.07
            labels = torch.zeros(logits.shape[0], dtype=torch.long).cuda()
            self._dequeue_and_enqueue(k)
            return logits, labels

    model = MoCo().cuda()
    truth.model(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.03, momentum=0.9, weight_decay=1e-4)
    for _ in range(4):
        im_q, im_k = torch.randn(128, 3, 128, 128).cuda(), torch.randn(128, 3, 128, 128).cuda()
        truth.label("inputs", [im_q, im_k])
        with truth.saving():
            logits, labels = model(im_q, im_k)
            loss = F.cross_entropy(logits, labels)
        truth.label("inputs", [labels])
        truth.label("activations", [logits, loss])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        truth.optimizer(optimizer)


# Language.


@program("t5_adafactor")
def t5_adafactor(truth: Truth) -> None:
    """An encoder and decoder of transformers with Adafactor."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=32128,
        d_model=512,
        d_kv=64,
        d_ff=2048,
        num_layers=4,
        num_heads=8,
        decoder_start_token_id=0,
        use_cache=False,
    )
    model = T5ForConditionalGeneration(config).to("cuda")
    truth.model(model)
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2)
    model.train()
    for _ in range(3):
        source = torch.randint(2, 32128, (12, 384))
        mask = torch.ones_like(source)
        for row in range(12):
            mask[row, 384 - 24 * row :] = 0
        target = torch.randint(2, 32128, (12, 96))
        target[:, 80:] = -100
        batch = {"input_ids": source.to("cuda"), "attention_mask": mask.to("cuda"), "labels": target.to("cuda")}
        truth.label("inputs", tensors(batch))
        with truth.saving():
            outputs = model(**batch)
        truth.label("activations", tensors(outputs))
        outputs.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        truth.optimizer(optimizer)


@program("bert_mlm")
def bert_mlm(truth: Truth) -> None:
    """BERT with masked tokens: groups of parameters, a warm-up, clipped gradients, bfloat16."""
    from transformers import BertConfig, BertForMaskedLM, get_linear_schedule_with_warmup

    device = torch.device("cuda")
    model = BertForMaskedLM(BertConfig(num_hidden_layers=6)).to(device)
    truth.model(model)
    no_decay = ["bias", "LayerNorm.weight"]
    groups = [
        {
            "params": [p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)],
            "weight_decay": 0.01,
        },
        {"params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=5e-5, eps=1e-8)
    scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=100)
    model.train()
    total_loss = 0.0
    for _ in range(4):
        input_ids = torch.randint(1000, 30522, (24, 256))
        attention_mask = (torch.arange(256)[None] < torch.randint(100, 257, (24, 1))).long()
        labels = input_ids.clone()
        masked = torch.rand(labels.shape) < 0.15
        labels[~masked] = -100
        input_ids[masked] = 103
        input_ids, attention_mask, labels = input_ids.to(device), attention_mask.to(device), labels.to(device)
        truth.label("inputs", [input_ids, attention_mask, labels])
        model.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16), truth.saving():
            outputs = model(input_ids, attention_mask=attention_mask, labels=labels)
            loss, logits = outputs[0], outputs[1]
        truth.label("activations", [loss, logits])
        total_loss += loss.item()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        truth.optimizer(optimizer)


program("bert_mlm_python", stacks="python")(bert_mlm)


def hf_trainer(truth: Truth) -> None:
    """transformers.Trainer: a small language model, bfloat16, two batches for each step; then its evaluation."""
    from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainerCallback, TrainingArguments

    class RandomTokens(Dataset):
        def __init__(self, length: int) -> None:
            self.length = length

        def __len__(self) -> int:
            return self.length

        def __getitem__(self, index: int) -> Dict[str, Tensor]:
            ids = torch.randint(32000, (512,), generator=torch.Generator().manual_seed(index))
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}

    class Writing(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            truth.model(model)

        def on_optimizer_step(
            self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any
        ) -> None:
            truth.optimizer(optimizer)

    class OurTrainer(Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            truth.label("inputs", tensors([inputs, num_items_in_batch]))
            with truth.saving():
                loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
            truth.label("activations", [loss, *tensors(outputs)])
            return (loss, outputs) if return_outputs else loss

    config = Qwen2Config(
        vocab_size=32000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=4,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        use_cache=False,
    )
    model = Qwen2ForCausalLM(config)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=8,
            per_device_eval_batch_size=8,
            max_steps=3,
            gradient_accumulation_steps=2,
            learning_rate=3e-4,
            warmup_steps=1,
            bf16=True,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_num_workers=0,
            seed=1,
        )
        trainer = OurTrainer(
            model=model,
            args=arguments,
            train_dataset=RandomTokens(64),
            eval_dataset=RandomTokens(16),
            callbacks=[Writing()],
        )
        trainer.train()
        trainer.args.prediction_loss_only = True
        trainer.evaluate()


program("hf_trainer")(hf_trainer)
program("hf_trainer_python", stacks="python")(hf_trainer)


@program("accelerate_clip")
def accelerate_clip(truth: Truth) -> None:
    """CLIP under accelerate: the loop of its documentation, with accumulated gradients."""
    from accelerate import Accelerator
    from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPVisionConfig

    text = CLIPTextConfig(
        vocab_size=20000,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=4,
        num_attention_heads=8,
        eos_token_id=1,
        bos_token_id=0,
    )
    vision = CLIPVisionConfig(
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=6,
        num_attention_heads=12,
        image_size=224,
        patch_size=32,
    )
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
    model = CLIPModel(CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=512))
    tokens = torch.randint(2, 20000, (6 * 96, 77))
    tokens[:, -1] = 1
    loader = DataLoader(TensorDataset(tokens, torch.randn(6 * 96, 3, 224, 224)), batch_size=96, shuffle=True)
    optimizer = torch.optim.NAdam(model.parameters(), lr=5e-4, weight_decay=0.2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    truth.model(model)
    model.train()
    for input_ids, pixel_values in loader:
        truth.label("inputs", [input_ids, pixel_values])
        with accelerator.accumulate(model):
            with truth.saving():
                outputs = model(input_ids=input_ids, pixel_values=pixel_values, return_loss=True)
            truth.label(
                "activations",
                tensors(
                    [
                        outputs.loss,
                        outputs.logits_per_image,
                        outputs.logits_per_text,
                        outputs.text_embeds,
                        outputs.image_embeds,
                        outputs.text_model_output,
                        outputs.vision_model_output,
                    ]
                ),
            )
            accelerator.backward(outputs.loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        truth.optimizer(optimizer)


def lightning(truth: Truth) -> None:
    """A segmentation network in a LightningModule, with half precision and a validation."""
    import pytorch_lightning as pl
    from torchvision.models.segmentation import lraspp_mobilenet_v3_large

    class Segmenter(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=21)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)["out"]

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            images, masks = batch
            logits = self(images)
            truth.label("activations", [logits])
            loss = F.cross_entropy(logits, masks)
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            images, masks = batch
            logits = self(images)
            truth.label("activations", [logits])
            self.log("val_loss", F.cross_entropy(logits, masks))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    class Writing(pl.Callback):
        saving: Any = None

        def on_train_start(self, trainer: Any, module: Any) -> None:
            truth.model(module)

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            truth.label("inputs", tensors(batch))
            self.saving = truth.saving()
            self.saving.__enter__()

        def on_before_backward(self, trainer: Any, module: Any, loss: Tensor) -> None:
            self.saving.__exit__(None, None, None)
            truth.label("activations", [loss])

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            truth.label("activations", tensors(outputs))
            for optimizer in trainer.optimizers:
                truth.optimizer(optimizer)

        def on_validation_batch_start(
            self, trainer: Any, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
        ) -> None:
            truth.label("inputs", tensors(batch))

    images, masks = torch.randn(32, 3, 320, 320), torch.randint(21, (32, 320, 320))
    data = TensorDataset(images, masks)
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            accelerator="gpu",
            devices=1,
            max_epochs=1,
            precision="16-mixed",
            logger=False,
            default_root_dir=folder,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            gradient_clip_val=0.5,
            num_sanity_val_steps=0,
            callbacks=[Writing()],
        )
        trainer.fit(Segmenter(), DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=16))


program("lightning")(lightning)


# Transformers of our own.


class Block(nn.Module):
    """As in nanoGPT."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        inner = 4 * width
        self.mlp = nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width), nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).split(c, dim=2)
        q, k, v = (it.view(b, t, self.heads, c // self.heads).transpose(1, 2) for it in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(
        self,
        vocab: int = 32768,
        width: int = 768,
        layers: int = 6,
        heads: int = 12,
        block_size: int = 1024,
        dropout: float = 0.0,
        tied: bool = False,
        reentrant: bool = False,
    ) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(block_size, width)
        self.h = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight
        self.reentrant = reentrant

    def forward(self, idx: Tensor, targets: Optional[Tensor] = None) -> Tuple[Tensor, Optional[Tensor]]:
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in self.h:
            if self.reentrant and self.training:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True)
            else:
                x = block(x)
        logits = self.lm_head(self.ln_f(x))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


def get_batch(truth: Truth, batch: int, length: int, vocab: int = 32768) -> Tuple[Tensor, Tensor]:
    data = torch.randint(vocab, (batch, length + 1))
    x, y = data[:, :-1].contiguous().to("cuda"), data[:, 1:].contiguous().to("cuda")
    truth.label("inputs", [x, y])
    return x, y


@program("reentrant")
def reentrant(truth: Truth) -> None:
    """Reentrant checkpoints: the blocks run again inside the backward pass."""
    model = GPT(layers=12, width=1024, heads=16, dropout=0.1, reentrant=True).cuda()
    truth.model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    for _ in range(3):
        x, y = get_batch(truth, 6, 1024)
        with truth.saving():
            logits, loss = model(x, y)
        truth.label("activations", [logits, loss])
        optimizer.zero_grad(set_to_none=True)
        # What the recomputed blocks save is an activation as well.
        with truth.saving():
            loss.backward()
        optimizer.step()
        truth.optimizer(optimizer)


@program("accumulated_zeroed")
def accumulated_zeroed(truth: Truth) -> None:
    """Four batches for each step; the gradients are set to zero and stay allocated."""
    vocab, width = 16000, 1024
    layer = nn.TransformerEncoderLayer(
        width, 16, dim_feedforward=4096, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
    )
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(vocab, width),
            "encoder": nn.TransformerEncoder(layer, num_layers=6, enable_nested_tensor=False),
            "head": nn.Linear(width, vocab),
        }
    ).cuda()
    truth.model(model)
    mask = nn.Transformer.generate_square_subsequent_mask(384).cuda()
    truth.label("inputs", [mask])
    optimizer = torch.optim.Adamax(model.parameters(), lr=2e-3)
    accumulation_steps = 4
    optimizer.zero_grad(set_to_none=False)
    for i in range(8):
        tokens = torch.randint(vocab, (8, 385)).cuda()
        truth.label("inputs", [tokens])
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        with truth.saving():
            hidden = model["encoder"](model["embed"](inputs), mask=mask, is_causal=True)
            logits = model["head"](hidden)
            loss = F.cross_entropy(logits.reshape(-1, vocab), targets.reshape(-1)) / accumulation_steps
        truth.label("activations", [hidden, logits, loss])
        loss.backward()
        if (i + 1) % accumulation_steps == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            truth.optimizer(optimizer)


@program("muon")
def muon(truth: Truth) -> None:
    """Muon for the matrices of the blocks, AdamW for the rest."""
    model = GPT(width=1024, layers=6, heads=16, tied=True).cuda()
    truth.model(model)
    matrices = [p for p in model.h.parameters() if p.ndim == 2]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    optimizers = [
        torch.optim.Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(rest, lr=3e-4, betas=(0.8, 0.95), fused=True),
    ]
    for _ in range(3):
        x, y = get_batch(truth, 6, 512)
        with torch.autocast("cuda", dtype=torch.bfloat16), truth.saving():
            _, loss = model(x, y)
        truth.label("activations", [loss, _])
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            truth.optimizer(optimizer)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)


class RMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rstd = torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, rstd)
        return x * rstd * weight

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tuple[Optional[Tensor], ...]:
        x, weight, rstd = ctx.saved_tensors
        normed = x * rstd
        grad_weight = (grad_output * normed).flatten(0, -2).sum(dim=0)
        grad_normed = grad_output * weight
        grad_x = rstd * (grad_normed - normed * (grad_normed * normed).mean(dim=-1, keepdim=True))
        return grad_x, grad_weight, None


class SwiGLUFunction(torch.autograd.Function):
    """Saves the two halves, and computes the product again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        grad_gate = grad_output * up * (sigmoid + silu * (1 - sigmoid))
        return grad_gate, grad_output * silu


class GatedMLP(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.ones(dim))
        self.w1, self.w2 = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.w3 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = RMSNormFunction.apply(x, self.norm, 1e-6)
        return x + self.w3(SwiGLUFunction.apply(self.w1(h), self.w2(h)))


@program("custom_function")
def custom_function(truth: Truth) -> None:
    """Functions of our own with save_for_backward, in a network on tabular data."""
    model = nn.Sequential(nn.Linear(256, 1024), *[GatedMLP(1024, 2816) for _ in range(8)], nn.Linear(1024, 16)).cuda()
    truth.model(model)
    optimizer = torch.optim.RAdam(model.parameters(), lr=1e-3)
    table, targets = torch.randn(65536, 256).cuda(), torch.randn(65536, 16).cuda()
    truth.label("inputs", [table, targets])
    for step in range(6):
        chosen = torch.randint(0, table.shape[0], (12288,), device="cuda")
        rows, wanted = table[chosen], targets[chosen]
        truth.label("inputs", [chosen, rows, wanted])
        with truth.saving():
            predicted = model(rows)
            loss = F.huber_loss(predicted, wanted)
        truth.label("activations", [predicted, loss])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        truth.optimizer(optimizer)


def local(tensor: Optional[Tensor]) -> Optional[Tensor]:
    """The part of a DTensor that is here."""
    return getattr(tensor, "_local_tensor", tensor)


class Sharded:
    """What the tensors of a model in FSDP2 are: the shards, and the parameters that are gathered for each layer."""

    def __init__(self, truth: Truth, model: nn.Module) -> None:
        self.truth, self.storages = truth, set()
        self.hooked = set()
        truth.label("parameters", [local(it) for it in model.parameters()] + list(model.buffers()))
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda it: truth.label("gradients", [local(it.grad)]))
        for module in model.modules():
            if list(module.parameters(recurse=False)):
                module.register_forward_pre_hook(self.gathered)

    def gathered(self, module: nn.Module, args: Any) -> None:
        for parameter in module.parameters(recurse=False):
            if hasattr(parameter, "_local_tensor"):
                continue
            self.truth.label("parameters", [parameter])
            self.storages.add(parameter.untyped_storage()._cdata)
            if id(parameter) not in self.hooked:
                self.hooked.add(id(parameter))
                parameter.register_post_accumulate_grad_hook(lambda it: self.truth.label("gradients", [it.grad]))

    def saving(self) -> Any:
        def pack(tensor: Tensor) -> Tensor:
            self.truth.label("activations", [tensor])
            return tensor

        def unpack(tensor: Tensor) -> Tensor:
            # Gathered again for the backward pass.
            if tensor.untyped_storage()._cdata in self.storages:
                self.truth.label("parameters", [tensor])
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        state = [local(it) for values in optimizer.state.values() for it in values.values() if isinstance(it, Tensor)]
        self.truth.label("optimizer_state", state)


@program("fsdp2")
def fsdp2(truth: Truth) -> None:
    """One rank of fully_shard, with parameters gathered in bfloat16."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import MistralConfig, MistralForCausalLM

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29641", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    torch.cuda.set_device(0)
    torch.distributed.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (1,))
    config = MistralConfig(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=6,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        use_cache=False,
    )
    model = MistralForCausalLM(config).cuda()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    sharded = Sharded(truth, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for _ in range(3):
        tokens = torch.randint(32000, (6, 768)).cuda()
        truth.label("inputs", [tokens])
        with sharded.saving():
            out = model(input_ids=tokens, labels=tokens)
        truth.label("activations", [out.loss, out.logits])
        out.loss.backward()
        truth.label("gradients", [local(it.grad) for it in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
        sharded.step(optimizer)
    torch.distributed.destroy_process_group()


# Second order, and without a state.


def label_lbfgs(truth: Truth, optimizer: torch.optim.LBFGS) -> None:
    """The history of L-BFGS: during a step it is in variables of the step, and else in the state."""
    kept = [tensors(list(state.values())) for state in optimizer.state.values()]
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "step" and frame.f_locals.get("self") is optimizer:
            names = ("d", "t", "old_dirs", "old_stps", "ro", "H_diag", "prev_flat_grad")
            if "prev_flat_grad" in frame.f_locals:
                kept.append([it for name in names for it in tensors(frame.f_locals.get(name))])
            break
        frame = frame.f_back
    truth.label("optimizer_state", [it for part in kept for it in part])


@program("lbfgs_physics")
def lbfgs_physics(truth: Truth) -> None:
    """A physics-informed network (Burgers' equation): derivatives of derivatives, L-BFGS with a line search."""

    class PINN(nn.Module):
        def __init__(self, width: int = 384, depth: int = 4) -> None:
            super().__init__()
            sizes = [2] + [width] * depth
            self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:]))
            self.out = nn.Linear(width, 1)

        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            h = torch.cat([x, t], dim=1)
            for layer in self.hidden:
                h = torch.tanh(layer(h))
            return self.out(h)

    device = torch.device("cuda")
    model = PINN().to(device)
    truth.model(model)
    x_f = (torch.rand(20000, 1, device=device) * 2 - 1).requires_grad_()
    t_f = torch.rand(20000, 1, device=device).requires_grad_()
    x_0 = torch.rand(4000, 1, device=device) * 2 - 1
    t_0, u_0 = torch.zeros_like(x_0), -torch.sin(math.pi * x_0)
    truth.label("inputs", [x_f, t_f, x_0, t_0, u_0])
    optimizer = torch.optim.LBFGS(
        model.parameters(), lr=1.0, max_iter=5, history_size=50, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        label_lbfgs(truth, optimizer)
        optimizer.zero_grad()
        with truth.saving():
            u = model(x_f, t_f)
            u_t = torch.autograd.grad(u, t_f, torch.ones_like(u), create_graph=True)[0]
            u_x = torch.autograd.grad(u, x_f, torch.ones_like(u), create_graph=True)[0]
            u_xx = torch.autograd.grad(u_x, x_f, torch.ones_like(u_x), create_graph=True)[0]
            residual = u_t + u * u_x - 0.01 / math.pi * u_xx
            start = model(x_0, t_0)
            loss = residual.pow(2).mean() + F.mse_loss(start, u_0)
        truth.label("activations", [u, u_t, u_x, u_xx, residual, start, loss])
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
        label_lbfgs(truth, optimizer)


@program("lbfgs_logistic")
def lbfgs_logistic(truth: Truth) -> None:
    """Multinomial logistic regression on the whole data with L-BFGS."""
    features, labels = torch.randn(16384, 12288).cuda(), torch.randint(512, (16384,)).cuda()
    truth.label("inputs", [features, labels])
    model = nn.Linear(12288, 512).cuda()
    truth.model(model)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=10, history_size=16)

    def closure() -> Tensor:
        label_lbfgs(truth, optimizer)
        optimizer.zero_grad()
        with truth.saving():
            logits = model(features)
            loss = F.cross_entropy(logits, labels) + 1e-4 * model.weight.square().sum()
        truth.label("activations", [logits, loss])
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
        label_lbfgs(truth, optimizer)


@program("plain_sgd")
def plain_sgd(truth: Truth) -> None:
    """A recommender: tables of embeddings and a network, with SGD that has no momentum."""

    class Recommender(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            rows = (1000000, 400000, 200000, 50000, 10000, 100)
            self.tables = nn.ModuleList(nn.EmbeddingBag(count, 64, mode="sum") for count in rows)
            self.bottom = nn.Sequential(
                nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU()
            )
            self.top = nn.Sequential(
                nn.Linear(64 + 21, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 1)
            )

        def forward(self, dense: Tensor, indices: List[Tensor], offsets: Tensor) -> Tensor:
            x = self.bottom(dense)
            vectors = torch.stack([x] + [table(ids, offsets) for table, ids in zip(self.tables, indices)], dim=1)
            products = torch.bmm(vectors, vectors.transpose(1, 2))
            rows, columns = torch.tril_indices(7, 7, offset=-1, device=x.device)
            return self.top(torch.cat([x, products[:, rows, columns]], dim=1)).squeeze(1)

    device = "cuda"
    model = Recommender().to(device)
    truth.model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_fn = nn.BCEWithLogitsLoss()
    for _ in range(6):
        batch = 65536
        dense = torch.rand(batch, 13).to(device)
        indices = [torch.randint(table.num_embeddings, (batch * 4,)).to(device) for table in model.tables]
        offsets = torch.arange(0, batch * 4, 4).to(device)
        clicks = torch.randint(2, (batch,)).float().to(device)
        truth.label("inputs", [dense, *indices, offsets, clicks])
        with truth.saving():
            score = model(dense, indices, offsets)
            loss = loss_fn(score, clicks)
        truth.label("activations", [score, loss])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        truth.optimizer(optimizer)


# Serving.


class CachedAttention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.wqkv, self.wo = nn.Linear(dim, dim * 3, bias=False), nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.wqkv(x).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        keys[:b, :, start : start + t] = k
        values[:b, :, start : start + t] = v
        out = F.scaled_dot_product_attention(q, keys[:b, :, : start + t], values[:b, :, : start + t], is_causal=t > 1)
        return self.wo(out.transpose(1, 2).reshape(b, t, c))


class ServedBlock(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.attention = CachedAttention(dim, heads)
        self.w1, self.w3 = nn.Linear(dim, dim * 3, bias=False), nn.Linear(dim, dim * 3, bias=False)
        self.w2 = nn.Linear(dim * 3, dim, bias=False)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
        x = x + self.attention(self.norm1(x), keys, values, start)
        h = self.norm2(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


@program("server_static_cache")
def server_static_cache(truth: Truth) -> None:
    """A server: batches of requests in inference mode, with keys and values in memory that was allocated once."""
    device, dtype, dim, heads, layers, vocab, most, longest = "cuda", torch.bfloat16, 1536, 12, 8, 32000, 24, 2048
    model = (
        nn.ModuleDict(
            {
                "embed": nn.Embedding(vocab, dim),
                "blocks": nn.ModuleList(ServedBlock(dim, heads) for _ in range(layers)),
                "norm": nn.RMSNorm(dim),
                "head": nn.Linear(dim, vocab, bias=False),
            }
        )
        .to(device=device, dtype=dtype)
        .eval()
    )
    truth.model(model)
    shape = (most, heads, longest, dim // heads)
    caches = [tuple(torch.zeros(shape, device=device, dtype=dtype) for _ in range(2)) for _ in range(layers)]
    truth.label("activations", tensors(caches))
    requests: "queue.Queue[Tuple[int, int]]" = queue.Queue()
    for request in ((24, 512), (8, 1200), (16, 300)):
        requests.put(request)

    @torch.inference_mode()
    def forward(tokens: Tensor, start: int) -> Tensor:
        x = model["embed"](tokens)
        for block, (keys, values) in zip(model["blocks"], caches):
            x = block(x, keys, values, start)
        return model["head"](model["norm"](x[:, -1]))

    while not requests.empty():
        size, length = requests.get()
        prompt = torch.randint(vocab, (size, length)).to(device)
        truth.label("inputs", [prompt])
        logits = forward(prompt, 0)
        answers, position = [], length
        truth.label("activations", [logits])
        for _ in range(6):
            with torch.inference_mode():
                probabilities = torch.softmax(logits.float() / 0.8, dim=-1)
                token = torch.multinomial(probabilities, 1)
            truth.label("activations", [probabilities, token])
            answers.append(token)
            logits = forward(token, position)
            truth.label("activations", [logits])
            position += 1
        text = torch.cat(answers, dim=1)
        truth.label("activations", [text])
        text = text.tolist()


# Graphs, sequences, single samples.


def graph_attention(truth: Truth) -> None:
    """Nodes of a large graph are classified by attention over their neighbours (torch_geometric)."""
    from torch_geometric.data import Data
    from torch_geometric.nn import GATConv

    class GAT(nn.Module):
        def __init__(self, in_channels: int, hidden: int, out_channels: int, heads: int) -> None:
            super().__init__()
            self.conv1 = GATConv(in_channels, hidden, heads, dropout=0.3)
            self.conv2 = GATConv(hidden * heads, hidden, heads, dropout=0.3)
            self.conv3 = GATConv(hidden * heads, out_channels, heads=1, concat=False, dropout=0.3)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            x = F.dropout(x, p=0.3, training=self.training)
            x = F.elu(self.conv1(x, edge_index))
            x = F.dropout(x, p=0.3, training=self.training)
            x = F.elu(self.conv2(x, edge_index))
            return self.conv3(x, edge_index)

    nodes, edges = 40000, 400000
    data = Data(x=torch.randn(nodes, 256), edge_index=torch.randint(nodes, (2, edges)), y=torch.randint(40, (nodes,)))
    data.train_mask = torch.rand(nodes) < 0.6
    device = torch.device("cuda")
    data = data.to(device)
    truth.label("inputs", [data.x, data.edge_index, data.y, data.train_mask])
    model = GAT(256, 64, 40, heads=4).to(device)
    truth.model(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005, weight_decay=5e-4)
    for _ in range(5):
        model.train()
        optimizer.zero_grad()
        with truth.saving():
            out = model(data.x, data.edge_index)
            loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        truth.label("activations", [out, loss])
        loss.backward()
        optimizer.step()
        truth.optimizer(optimizer)
        model.eval()
        with torch.no_grad():
            pred = model(data.x, data.edge_index).argmax(dim=-1)
            truth.label("activations", [pred])


program("graph_attention")(graph_attention)
program("graph_attention_python", stacks="python")(graph_attention)


@program("graph_batches")
def graph_batches(truth: Truth) -> None:
    """Small graphs in batches (torch_geometric's loader), with sums over each."""
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader as GraphLoader
    from torch_geometric.nn import GINConv, global_add_pool

    class GIN(nn.Module):
        def __init__(self, width: int = 512, layers: int = 5) -> None:
            super().__init__()
            self.embed = nn.Embedding(120, width)
            self.convs = nn.ModuleList(
                GINConv(
                    nn.Sequential(
                        nn.Linear(width, 2 * width), nn.BatchNorm1d(2 * width), nn.ReLU(), nn.Linear(2 * width, width)
                    ),
                    train_eps=True,
                )
                for _ in range(layers)
            )
            self.head = nn.Linear(width, 1)

        def forward(self, z: Tensor, edge_index: Tensor, batch: Tensor, size: int) -> Tensor:
            h = self.embed(z)
            for conv in self.convs:
                h = h + F.relu(conv(h, edge_index))
            return self.head(global_add_pool(h, batch, size=size)).squeeze(-1)

    graphs = []
    for _ in range(3200):
        atoms = int(torch.randint(15, 30, (1,)))
        kinds, edges = torch.randint(120, (atoms,)), torch.randint(atoms, (2, atoms * 3))
        graphs.append(Data(z=kinds, edge_index=edges, y=torch.randn(1), num_nodes=atoms))
    loader = GraphLoader(graphs, batch_size=800, shuffle=True)
    model = GIN().cuda()
    truth.model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, amsgrad=True)
    for batch in loader:
        batch = batch.to("cuda")
        truth.label("inputs", [it for _, it in batch.to_dict().items()] + [batch.batch, batch.ptr])
        with truth.saving():
            energy = model(batch.z, batch.edge_index, batch.batch, batch.num_graphs)
            loss = F.l1_loss(energy, batch.y)
        truth.label("activations", [energy, loss])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        truth.optimizer(optimizer)


@program("gru_packed")
def gru_packed(truth: Truth) -> None:
    """Sentences of different lengths, packed, through a bidirectional GRU."""
    from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(40000, 384, padding_idx=0)
            self.rnn = nn.GRU(384, 640, num_layers=2, batch_first=True, bidirectional=True, dropout=0.3)
            self.classifier = nn.Linear(1280, 48)

        def forward(self, text: Tensor, lengths: Tensor) -> Tensor:
            embedded = F.dropout(self.embedding(text), 0.3, self.training)
            packed = pack_padded_sequence(embedded, lengths, batch_first=True, enforce_sorted=False)
            packed, _ = self.rnn(packed)
            out, _ = pad_packed_sequence(packed, batch_first=True)
            return self.classifier(out)

    model = Tagger().cuda()
    truth.model(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(5):
        lengths = torch.randint(20, 200, (160,))
        text = pad_sequence([torch.randint(1, 40000, (int(n),)) for n in lengths], batch_first=True)
        tags = pad_sequence([torch.randint(48, (int(n),)) for n in lengths], batch_first=True, padding_value=-100)
        text, tags = text.cuda(), tags.cuda()
        truth.label("inputs", [text, tags])
        optimizer.zero_grad()
        with truth.saving():
            scores = model(text, lengths)
            loss = F.cross_entropy(scores.flatten(0, 1), tags.flatten(), ignore_index=-100)
        truth.label("activations", [scores, loss])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        truth.optimizer(optimizer)


def unwrapped(tensor: Tensor) -> Tensor:
    """The tensor under the wrappers of torch.func."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def label_graph(truth: Truth, result: Tensor) -> None:
    """What the graph of a result saved, where torch.func forbids hooks for it."""
    waiting, seen = [result.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting.extend(following for following, _ in node.next_functions)
        for name in dir(node):
            if name.startswith("_saved_"):
                truth.label("activations", [unwrapped(it) for it in tensors(getattr(node, name))])


@program("per_sample_gradients")
def per_sample_gradients(truth: Truth) -> None:
    """Gradients of each sample by torch.func, clipped and averaged (differentially private SGD)."""
    from torch.func import functional_call, grad, vmap

    class SimpleCNN(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.conv2 = nn.Conv2d(1, 32, 3, 1), nn.Conv2d(32, 64, 3, 1)
            self.fc1, self.fc2 = nn.Linear(9216, 128), nn.Linear(128, 10)

        def forward(self, x: Tensor) -> Tensor:
            x = F.relu(self.conv1(x))
            x = F.relu(self.conv2(x))
            x = torch.flatten(F.max_pool2d(x, 2), 1)
            return F.log_softmax(self.fc2(F.relu(self.fc1(x))), dim=1)

    device = "cuda"
    model = SimpleCNN().to(device=device)
    truth.model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def compute_loss(params: Dict[str, Tensor], buffers: Dict[str, Tensor], sample: Tensor, target: Tensor) -> Tensor:
        predictions = functional_call(model, (params, buffers), (sample.unsqueeze(0),))
        loss = F.nll_loss(predictions, target.unsqueeze(0))
        label_graph(truth, loss)
        return loss

    ft_compute_sample_grad = vmap(grad(compute_loss), in_dims=(None, None, 0, 0))
    for _ in range(4):
        data, targets = torch.randn(256, 1, 28, 28, device=device), torch.randint(10, (256,), device=device)
        truth.label("inputs", [data, targets])
        params = {k: v.detach() for k, v in model.named_parameters()}
        buffers = {k: v.detach() for k, v in model.named_buffers()}
        per_sample = ft_compute_sample_grad(params, buffers, data, targets)
        truth.label("gradients", per_sample.values())
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in per_sample.values()]).norm(dim=0)
        factor = (1.0 / (norms + 1e-6)).clamp(max=1.0)
        for name, parameter in model.named_parameters():
            summed = torch.einsum("b...,b->...", per_sample[name], factor)
            parameter.grad = (summed + 0.5 * torch.randn_like(summed)) / data.shape[0]
            truth.label("gradients", [parameter.grad])
        optimizer.step()
        optimizer.zero_grad()
        truth.optimizer(optimizer)


@program("cuda_graph")
def cuda_graph(truth: Truth) -> None:
    """The whole step is captured in a CUDA graph after a warm-up on another stream, as the documentation does."""
    N, D_in, H, D_out = 6144, 2048, 4096, 1024
    model = nn.Sequential(
        nn.Linear(D_in, H),
        nn.ReLU(),
        nn.Dropout(p=0.2),
        nn.Linear(H, H),
        nn.ReLU(),
        nn.LayerNorm(H),
        nn.Linear(H, H),
        nn.GELU(),
        nn.Dropout(p=0.1),
        nn.Linear(H, D_out),
    ).cuda()
    truth.model(model)
    loss_fn = nn.MSELoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, capturable=True)
    static_input, static_target = torch.randn(N, D_in, device="cuda"), torch.randn(N, D_out, device="cuda")
    truth.label("inputs", [static_input, static_target])

    s = torch.cuda.Stream()
    s.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(s):
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            with truth.saving():
                y_pred = model(static_input)
                loss = loss_fn(y_pred, static_target)
            truth.label("activations", [y_pred, loss])
            loss.backward()
            optimizer.step()
            truth.optimizer(optimizer)
    torch.cuda.current_stream().wait_stream(s)

    g = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(g):
        with truth.saving():
            static_y_pred = model(static_input)
            static_loss = loss_fn(static_y_pred, static_target)
        truth.label("activations", [static_y_pred, static_loss])
        static_loss.backward()
        optimizer.step()
    truth.optimizer(optimizer)
    for _ in range(40):
        data, target = torch.rand(N, D_in, device="cuda"), torch.rand(N, D_out, device="cuda")
        truth.label("inputs", [data, target])
        static_input.copy_(data)
        static_target.copy_(target)
        g.replay()
    torch.cuda.synchronize()


# Out of memory in the first step.


@program("oom_first_forward")
def oom_first_forward(truth: Truth) -> None:
    """The batch is too large for the first forward pass."""
    from torchvision.models.segmentation import deeplabv3_resnet101

    limit(4.0)
    model = deeplabv3_resnet101(weights=None, weights_backbone=None, num_classes=19, aux_loss=True).cuda()
    truth.model(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss(ignore_index=255)
    for _ in range(3):
        images, masks = torch.randn(24, 3, 320, 320).cuda(), torch.randint(19, (24, 320, 320)).cuda()
        truth.label("inputs", [images, masks])
        with truth.saving():
            out = model(images)
            loss = criterion(out["out"], masks) + 0.4 * criterion(out["aux"], masks)
        truth.label("activations", [out["out"], out["aux"], loss])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        truth.optimizer(optimizer)


def oom_backward(truth: Truth) -> None:
    """The forward pass fits, the gradients of the many parameters do not."""
    from transformers import RobertaConfig, RobertaForSequenceClassification

    limit(4.0)
    device = torch.device("cuda")
    config = RobertaConfig(
        vocab_size=50265,
        hidden_size=1280,
        num_hidden_layers=24,
        num_attention_heads=20,
        intermediate_size=5120,
        max_position_embeddings=514,
        num_labels=3,
    )
    model = RobertaForSequenceClassification(config).to(device)
    truth.model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    model.train()
    for _ in range(3):
        input_ids = torch.randint(5, 50265, (4, 128), device=device)
        mask, labels = torch.ones_like(input_ids), torch.randint(3, (4,), device=device)
        truth.label("inputs", [input_ids, mask, labels])
        with truth.saving():
            outputs = model(input_ids=input_ids, attention_mask=mask, labels=labels)
        truth.label("activations", [outputs.loss, outputs.logits])
        outputs.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        truth.optimizer(optimizer)


program("oom_first_backward")(oom_backward)
program("oom_first_backward_python", stacks="python")(oom_backward)


@program("oom_backward_logits")
def oom_backward_logits(truth: Truth) -> None:
    """The gradient of the logits of a large vocabulary does not fit."""
    limit(5.0)
    model = GPT(vocab=50304, width=512, layers=4, heads=8).cuda()
    truth.model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for _ in range(3):
        x, y = get_batch(truth, 12, 512, 50304)
        with truth.saving():
            logits, loss = model(x, y)
        truth.label("activations", [logits, loss])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        truth.optimizer(optimizer)


@program("oom_first_step")
def oom_first_step(truth: Truth) -> None:
    """The first step of the optimizer makes a state that does not fit."""
    limit(4.5)
    model = GPT(vocab=32768, width=1280, layers=16, heads=20, tied=True).cuda()
    truth.model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for _ in range(3):
        x, y = get_batch(truth, 2, 256)
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16), truth.saving():
            logits, loss = model(x, y)
        truth.label("activations", [logits, loss])
        loss.backward()
        try:
            optimizer.step()
        finally:
            truth.optimizer(optimizer)


NAMES = [name for name in base.PROGRAMS if name not in BEFORE]


def main() -> None:
    folder, names = sys.argv[1], sys.argv[2:] or NAMES
    os.makedirs(folder, exist_ok=True)
    if len(names) == 1:
        base.run(names[0], folder)
        return
    # Each in a process of its own: settings and limits are per process.
    for name in names:
        try:
            code = subprocess.run([sys.executable, os.path.abspath(__file__), folder, name], timeout=180).returncode
        except subprocess.TimeoutExpired:
            code = "no end after 180 s"
        if code:
            print(f"{name}: failed ({code})", flush=True)


if __name__ == "__main__":
    main()
