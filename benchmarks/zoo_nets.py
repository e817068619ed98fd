"""Networks of plain torch, of kinds that no package above has: each as one writes it the first time."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from zoo_models import Row


class WordLM(nn.Module):
    """An LSTM language model; its state is returned."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(96, 32), nn.LSTM(32, 32, 2, batch_first=True), nn.Linear(32, 96)

    def forward(self, tokens: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        hidden, state = self.lstm(self.embed(tokens))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten()), state


class Seq2Seq(nn.Module):
    """GRUs with attention, a step at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.encoder = nn.Embedding(96, 32), nn.GRU(32, 32, bidirectional=True, batch_first=True)
        self.cell, self.query, self.head = nn.GRUCell(96, 32), nn.Linear(32, 64), nn.Linear(96, 96)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, last = self.encoder(self.embed(source))
        state, logits = last.sum(0), []
        for word in self.embed(target).unbind(1):
            weights = torch.softmax(memory @ self.query(state)[:, :, None], 1)
            context = (weights * memory).sum(1)
            state = self.cell(torch.cat([word, context], -1), state)
            logits.append(self.head(torch.cat([state, context], -1)))
        return torch.stack(logits, 1)


class Translator(nn.Module):
    """``nn.Transformer`` with its masks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(96, 32), nn.Linear(32, 96)
        self.body = nn.Transformer(32, 4, 2, 2, 64, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        padding = source == 5
        hidden = self.body(self.embed(source), self.embed(target), tgt_mask=mask, src_key_padding_mask=padding)
        return self.head(hidden)


class VAE(nn.Module):
    """Draws what it decodes."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(64, 16), nn.Linear(8, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        return torch.sigmoid(self.decoder(z)), mean, log_variance


class DLRM(nn.Module):
    """Recommends: bags of embeddings, and every pair of features multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(50, 8, mode="sum") for _ in range(3))
        self.bottom, self.top = nn.Linear(4, 8), nn.Sequential(nn.Linear(14, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense: Tensor, words: list[Tensor], offsets: list[Tensor]) -> Tensor:
        bottom = self.bottom(dense).relu()
        found = [bottom, *(bag(w, o) for bag, w, o in zip(self.bags, words, offsets, strict=True))]
        features = torch.stack(found, 1)
        pairs = torch.bmm(features, features.transpose(1, 2))
        rows, columns = torch.tril_indices(4, 4, -1)
        return self.top(torch.cat([bottom, pairs[:, rows, columns]], 1))


class NeRF(nn.Module):
    """Renders rays: sines, sorted samples, a cumulative product."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3 * 8, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, origins: Tensor, directions: Tensor) -> Tensor:
        depths = (torch.linspace(0, 1, 8) + torch.rand(origins.shape[0], 8) / 8).sort(-1).values
        points = origins[:, None] + depths[..., None] * directions[:, None]
        waves = points[..., None] * 2.0 ** torch.arange(4)
        out = self.net(torch.cat([waves.sin(), waves.cos()], -1).flatten(-2))
        alpha = 1 - torch.exp(-F.relu(out[..., 3]) / 8)
        left = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-6], -1), -1)[:, :-1]
        return ((alpha * left)[..., None] * torch.sigmoid(out[..., :3])).sum(1)


class Flow(nn.Module):
    """A normalizing flow: invertible matrices, log-determinants."""

    def __init__(self) -> None:
        super().__init__()
        self.mixes = nn.ParameterList(torch.linalg.qr(torch.randn(8, 8)).Q for _ in range(2))
        self.nets = nn.ModuleList(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(len(x))
        for mix, net in zip(self.mixes, self.nets, strict=True):
            a, b = (x @ mix).chunk(2, -1)
            scale, shift = net(a).chunk(2, -1)
            x = torch.cat([a, b * scale.tanh().exp() + shift], -1)
            total = total + scale.tanh().sum(-1) + torch.linalg.slogdet(mix).logabsdet
        return (x.square().sum(-1) / 2 - total).mean()


class GaussianProcess(nn.Module):
    """The marginal likelihood: a Cholesky factor and triangular solves."""

    def __init__(self) -> None:
        super().__init__()
        self.length, self.noise = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scaled = x / self.length.exp()
        kernel = torch.exp(-torch.cdist(scaled, scaled).square() / 2) + self.noise.exp() * torch.eye(len(x))
        factor = torch.linalg.cholesky(kernel)
        weights = torch.cholesky_solve(y[:, None], factor)
        return (y[:, None] * weights).sum() / 2 + factor.diagonal().log().sum()


class NeuralODE(nn.Module):
    """Runge-Kutta steps of a learnt field."""

    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, y: Tensor, times: Tensor) -> Tensor:
        path = [y]
        for start, end in pairwise(times):
            step, now = end - start, start.expand(len(y), 1)
            one = self.field(torch.cat([y, now], -1))
            two = self.field(torch.cat([y + step / 2 * one, now + step / 2], -1))
            y = y + step * two
            path.append(y)
        return torch.stack(path)


class FourierOperator(nn.Module):
    """A Fourier neural operator: complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.drop = nn.Conv1d(2, 8, 1), nn.Conv1d(8, 1, 1)
        self.weights = nn.Parameter(torch.randn(8, 8, 6, dtype=torch.cfloat) / 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.lift(x)
        spectrum = torch.fft.rfft(y)
        mixed = torch.zeros_like(spectrum)
        mixed[..., :6] = torch.einsum("bim,iom->bom", spectrum[..., :6], self.weights)
        return self.drop(F.gelu(y + torch.fft.irfft(mixed, n=x.shape[-1])))


class VectorQuantizer(nn.Module):
    """The nearest of a book of codes, straight through, with a running mean of use."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder, self.codes = nn.Linear(16, 8), nn.Linear(8, 16), nn.Embedding(12, 8)
        self.register_buffer("used", torch.zeros(12))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encoder(x)
        nearest = torch.cdist(z, self.codes.weight).argmin(-1)
        code = self.codes(nearest)
        if self.training:
            self.used.mul_(0.9).add_(F.one_hot(nearest.flatten(), 12).float().sum(0), alpha=0.1)
        quantized = z + (code - z).detach()
        loss = F.mse_loss(code, z.detach()) + F.mse_loss(z, code.detach()) / 4
        return self.decoder(quantized), loss


class TopKExperts(nn.Module):
    """A mixture of experts that gathers the tokens of each."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(16, 4), nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.gate(flat).softmax(-1).topk(2)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            tokens, place = torch.where(chosen == number)
            out.index_add_(0, tokens, expert(flat[tokens]) * weights[tokens, place, None])
        return out.view_as(x)


class PointNet(nn.Module):
    """A dynamic graph of nearest points."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(6, 16, 1), nn.BatchNorm2d(16), nn.LeakyReLU(0.2))
        self.last = nn.Linear(16, 5)

    def forward(self, points: Tensor) -> Tensor:
        near = torch.cdist(points, points).topk(4, largest=False).indices
        found = torch.stack([cloud[index] for cloud, index in zip(points, near, strict=True)])
        here = points[:, :, None].expand_as(found)
        edges = torch.cat([here, found - here], -1).permute(0, 3, 1, 2)
        return self.last(self.first(edges).amax(-1).amax(-1))


class Normed(nn.Module):
    """A discriminator: spectral norm, weight norm, pixel shuffles."""

    def __init__(self) -> None:
        super().__init__()
        norms = nn.utils.parametrizations
        self.body = nn.Sequential(
            norms.spectral_norm(nn.Conv2d(3, 16, 3, padding=1)), nn.LeakyReLU(0.2), nn.PixelUnshuffle(2),
            norms.weight_norm(nn.Conv2d(64, 8, 3)), nn.InstanceNorm2d(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Linear(8, 1)

    def forward(self, picture: Tensor) -> Tensor:
        return self.head(self.body(picture))


class Capsules(nn.Module):
    """Routing by agreement."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(1, 12, 5, 8, 4) / 4)

    def forward(self, u: Tensor) -> Tensor:
        votes = (self.weights @ u[:, :, None, :, None]).squeeze(-1)
        logits = torch.zeros(votes.shape[:3])
        for _ in range(3):
            total = (logits.softmax(-1)[..., None] * votes).sum(1)
            square = total.square().sum(-1, keepdim=True)
            out = square / (1 + square) * total / (square + 1e-6).sqrt()
            logits = logits + (votes * out[:, None]).sum(-1)
        return out.norm(dim=-1)


class WaveNet(nn.Module):
    """Dilated causal convolutions with gates and skips."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv1d(1, 8, 1), nn.Conv1d(8, 4, 1)
        self.gates = nn.ModuleList(nn.Conv1d(8, 16, 2, dilation=2**i) for i in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x, skips = self.first(x), torch.zeros(())
        for number, gate in enumerate(self.gates):
            a, b = gate(F.pad(x, (2**number, 0))).chunk(2, 1)
            y = a.tanh() * b.sigmoid()
            x, skips = x + y, skips + y
        return self.last(F.relu(skips))


class Siamese(nn.Module):
    """One network for three pictures, and a margin."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(392, 16))

    def forward(self, anchor: Tensor, same: Tensor, other: Tensor) -> Tensor:
        return F.triplet_margin_loss(*(F.normalize(self.net(x), dim=-1) for x in (anchor, same, other)))


class Masked(nn.Module):
    """A loss over those tokens only that a mask picks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(96, 32), nn.Linear(32, 32), nn.Linear(32, 96)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        hidden = F.gelu(self.body(self.embed(tokens)))
        return F.cross_entropy(self.head(hidden[mask]), tokens[mask])


def words(*shape: int) -> Tensor:
    """Tokens."""
    return torch.randint(5, 96, shape or (2, 12))


NETS: Mapping[type[nn.Module], Any] = {
    WordLM: lambda: {"tokens": words()},
    Seq2Seq: lambda: {"source": words(), "target": words(2, 6)},
    Translator: lambda: {"source": words(), "target": words(2, 6)},
    VAE: lambda: {"x": torch.rand(4, 64)},
    DLRM: lambda: {"dense": torch.rand(4, 4), "words": [torch.randint(0, 50, (10,)) for _ in range(3)],
                   "offsets": [torch.tensor([0, 2, 5, 7]) for _ in range(3)]},
    NeRF: lambda: {"origins": torch.rand(16, 3), "directions": torch.randn(16, 3)},
    Flow: lambda: {"x": torch.randn(6, 8)},
    GaussianProcess: lambda: {"x": torch.randn(10, 3), "y": torch.randn(10)},
    NeuralODE: lambda: {"y": torch.randn(4, 4), "times": torch.linspace(0, 1, 5)},
    FourierOperator: lambda: {"x": torch.randn(2, 2, 32)},
    VectorQuantizer: lambda: {"x": torch.randn(2, 6, 16)},
    TopKExperts: lambda: {"x": torch.randn(2, 8, 16)},
    PointNet: lambda: {"points": torch.rand(2, 16, 3)},
    Normed: lambda: {"picture": torch.randn(2, 3, 16, 16)},
    Capsules: lambda: {"u": torch.randn(2, 12, 4)},
    WaveNet: lambda: {"x": torch.randn(2, 1, 64)},
    Siamese: lambda: {"anchor": torch.rand(4, 3, 16, 16), "same": torch.rand(4, 3, 16, 16),
                      "other": torch.rand(4, 3, 16, 16)},
    Masked: lambda: {"tokens": words(), "mask": torch.rand(2, 12) < 0.5},
}  # fmt: skip

ROWS: list[Row] = [
    Row(net.__name__, "plain torch", "torch", lambda training, net=net, inputs=inputs: (net(), inputs()))
    for net, inputs in NETS.items()
]
