"""A published head, layer for layer, converted by one line: the projector and the predictor of SimSiam (2021).

The layers are those of Chen and He's https://github.com/facebookresearch/simsiam, file simsiam/builder.py, rewritten
here: three Linear and BatchNorm1d with ReLU in place between them, the last Linear with a frozen bias and the last
BatchNorm1d without weight and bias, then a predictor with a bottleneck. An encoder of one Linear stands in for the
ResNet.

Two copies train for ten steps in float64, one after `gsbn.torch.convert`; their losses are printed side by side.
"""

import argparse
import copy
import importlib.util
import sys

if importlib.util.find_spec("torch") is None:
    sys.exit("published_head: needs PyTorch: pip install torch")
import torch
from torch import nn
from torch.nn.functional import cosine_similarity

import gsbn.torch


class Twins(nn.Module):
    """Two views of a batch through encoder, projector and predictor; each predicts the other's projection."""

    def __init__(self, inputs, width, dim, bottleneck):
        super().__init__()
        last = nn.Linear(width, dim)
        last.bias.requires_grad = False  # the normalisation after it takes it out
        hidden = [(nn.Linear(width, width, bias=False), nn.BatchNorm1d(width), nn.ReLU(inplace=True)) for _ in range(2)]
        self.encoder = nn.Linear(inputs, width)
        self.projector = nn.Sequential(*hidden[0], *hidden[1], last, nn.BatchNorm1d(dim, affine=False))
        self.predictor = nn.Sequential(
            nn.Linear(dim, bottleneck, bias=False),
            nn.BatchNorm1d(bottleneck),
            nn.ReLU(inplace=True),
            nn.Linear(bottleneck, dim),
        )

    def forward(self, one, other):
        projected = [self.projector(self.encoder(view)) for view in (one, other)]
        predicted = [self.predictor(z) for z in projected]
        pairs = zip(predicted, reversed(projected), strict=True)
        return -sum(cosine_similarity(p, z.detach()).mean() for p, z in pairs) / 2


def losses(model, rows, inputs, steps=10):
    """One for each step of SGD, on the same batches every time."""
    device, draw = next(model.parameters()).device, torch.Generator().manual_seed(1)
    optimiser = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    found = []
    for _ in range(steps):
        batch, *noise = (torch.randn(rows, inputs, generator=draw, dtype=torch.float64) for _ in range(3))
        loss = model(*((batch + 0.3 * view).to(device) for view in noise))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        found.append(loss.item())
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--width", type=int, default=128, help="2048 in the paper; the bottleneck is a quarter of it")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and importlib.util.find_spec("cupy") is None:
        sys.exit("published_head: needs CuPy on a GPU: pip install 'cupy-cuda12x[ctk]' or 'cupy-cuda13x[ctk]'")
    torch.manual_seed(0)
    plain = Twins(48, options.width, options.width, options.width // 4).double().to(device)
    converted = copy.deepcopy(plain)
    print(gsbn.torch.convert(converted))  # the one line
    curves = [losses(model, options.rows, 48) for model in (plain, converted)]
    for theirs, ours in zip(*curves, strict=True):
        print(f"loss {theirs:+.12f} plain, {ours:+.12f} converted")
    furthest = max(abs(a - b) for a, b in zip(*curves, strict=True))
    print(f"{device}: furthest apart in ten steps: {furthest:.1e}")
    assert furthest <= 1e-10, "the converted head computes something else"


if __name__ == "__main__":
    main()
