"""Barlow Twins (Zbontar et al. 2021) on handwritten digits: a small encoder and the wide projector that costs the time.

python examples/barlow_twins_head.py                                 plain PyTorch
python examples/barlow_twins_head.py --convert                       and the same model after gsbn.torch.convert
python examples/barlow_twins_head.py --convert --rows 2048 --width 8192 --bfloat16      the paper's size, on a GPU

Two views of each digit, shifted and noisy, should have the same projection, and its features should not repeat one
another. No label is used in training; at the end the nearest neighbours among the encoder's features are asked for one.
With --convert the same seed trains both models. How far two curves of one model lie apart is measured by another seed
of the plain model: the converted one must be no further from the plain one.
"""

import argparse
import copy
import importlib.util
import sys
import time
from pathlib import Path

try:
    import torch
    from sklearn.datasets import load_digits
    from torch import nn
except ModuleNotFoundError as error:
    sys.exit(f"barlow_twins_head: needs {error.name}: pip install torch scikit-learn")

CODE, HELD_OUT, WARM_UP = 128, 360, 3  # the encoder's features; digits for the test; steps that are not timed
OFF_DIAGONAL = 0.0051  # the weight of the redundancy term in the paper
CURVES = Path(__file__).resolve().parents[1] / "build" / "barlow_twins.png"  # in a folder that git ignores


class BarlowTwins(nn.Module):
    """Encoder, projector, and the normalisation of its output; plain PyTorch."""

    def __init__(self, width):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(64, 512, bias=False), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, CODE)
        )
        self.projector = nn.Sequential(
            nn.Linear(CODE, width, bias=False), nn.BatchNorm1d(width), nn.ReLU(),
            nn.Linear(width, width, bias=False), nn.BatchNorm1d(width), nn.ReLU(),
            nn.Linear(width, width, bias=False),
        )  # fmt: skip
        self.norm = nn.BatchNorm1d(width, affine=False)

    def forward(self, one, other):
        """How far the correlation of the two views' features is from the identity."""
        a, b = (self.norm(self.projector(self.encoder(view))).float() for view in (one, other))
        correlation = a.T @ b / len(a)
        squares = (correlation - torch.eye(len(correlation), device=a.device)).square()
        of_diagonal = squares.diagonal().sum()
        return (of_diagonal + OFF_DIAGONAL * (squares.sum() - of_diagonal)) / len(correlation)


def view(digits, draw):
    """Each digit shifted by up to a pixel in both directions, with noise."""
    padded = nn.functional.pad(digits.reshape(-1, 8, 8), (1, 1, 1, 1))
    down, right = (torch.randint(0, 3, (len(digits), 1, 1), generator=draw, device=digits.device) for _ in range(2))
    steps, at = torch.arange(8, device=digits.device), torch.arange(len(digits), device=digits.device)
    shifted = padded[at[:, None, None], down + steps[:, None], right + steps]
    noise = torch.randn(shifted.shape, generator=draw, device=digits.device)
    return (shifted + 0.1 * noise).reshape(len(digits), 64)


def train(model, digits, seed, options):
    """The losses, and the seconds of a step."""
    device = digits.device
    draw = torch.Generator(device).manual_seed(seed)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses, started = [], 0.0
    for step in range(options.steps):
        if step == min(WARM_UP, options.steps - 1):
            _synchronize(device)
            started = time.perf_counter()
        batch = digits[torch.randint(0, len(digits), (options.rows,), generator=draw, device=device)]
        with torch.autocast(device.type, torch.bfloat16, enabled=options.bfloat16):
            loss = model(view(batch, draw), view(batch, draw))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.detach())
    _synchronize(device)
    seconds = (time.perf_counter() - started) / max(options.steps - WARM_UP, 1)
    return torch.stack(losses).cpu(), seconds


def _synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


@torch.no_grad()
def neighbours_know(model, digits, labels):
    """The share of held out digits whose nearest neighbour, by the encoder's features, has their label."""
    codes = nn.functional.normalize(model.eval().encoder(digits))
    nearest = (codes[:HELD_OUT] @ codes[HELD_OUT:].T).argmax(1)
    return (labels[HELD_OUT:][nearest] == labels[:HELD_OUT]).float().mean().item()


def smooth(losses):
    """Means over windows of a tenth of the run: the noise of single batches is of no interest."""
    return torch.stack([part.mean() for part in losses.tensor_split(10)])


def save_plot(curves, file):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for name, losses in curves.items():
        axes.plot(losses, label=name, linewidth=1)
    axes.set(xlabel="step", ylabel="loss", yscale="log")
    axes.legend()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
    print(f"curves in {file}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--convert", action="store_true", help="train the converted model, too, and compare")
    parser.add_argument("--rows", type=int, default=256, help="of a batch; 2048 in the paper")
    parser.add_argument("--width", type=int, default=256, help="of the projector; 8192 in the paper")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--bfloat16", action="store_true", help="under torch.autocast")
    parser.add_argument("--plot", type=Path, default=CURVES, help="where the curves are saved, if matplotlib is there")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.convert and device.type == "cuda" and importlib.util.find_spec("cupy") is None:
        sys.exit("barlow_twins_head: needs CuPy on a GPU: pip install 'cupy-cuda12x[ctk]' or 'cupy-cuda13x[ctk]'")
    data = load_digits()
    order = torch.randperm(len(data.data), generator=torch.Generator().manual_seed(0))
    digits = torch.tensor(data.data / 16, dtype=torch.float32)[order].to(device)
    labels = torch.tensor(data.target)[order].to(device)

    def made(seed):
        torch.manual_seed(seed)
        return BarlowTwins(options.width).to(device)

    models = {"plain": made(0)}
    if options.convert:
        import gsbn.torch

        models["converted"] = copy.deepcopy(models["plain"])
        gsbn.torch.convert(models["converted"])  # the one line
        models["plain, another seed"] = made(1)
    curves, seconds = {}, {}
    for name, model in models.items():
        curves[name], seconds[name] = train(model, digits[HELD_OUT:], int(name.endswith("another seed")), options)
        right = neighbours_know(model, digits, labels)
        print(
            f"{name}: loss {curves[name][0]:.4f} to {curves[name][-1]:.4f}, {right:.1%} of neighbours right, ", end=""
        )
        print(f"{seconds[name] * 1e3:.2f} ms a step")
    if importlib.util.find_spec("matplotlib"):
        save_plot(curves, options.plot)
    if options.convert:
        plain, converted, other = map(smooth, curves.values())
        apart, noise = ((curve / plain).log().abs().mean().item() for curve in (converted, other))
        print(f"the curves differ by {apart:.2%} on average, those of two seeds of the plain model by {noise:.2%}")
        ratio = seconds["converted"] / seconds["plain"]
        told = (
            f"saves {1 - ratio:.0%} of the time" if ratio < 1 else f"takes {ratio:.2f} times as long, and saves nothing"
        )
        print(f"{device.type}: one line {told}")
        assert apart <= noise, "the converted model learns otherwise than the plain one"


if __name__ == "__main__":
    main()
