"""Train a classifier of handwritten digits with `gsbn.forward` and `gsbn.backward` alone: arrays, and no autograd.

Three layers of Linear, scale and BatchNorm1d with ReLU between them, on CuPy arrays where there is a GPU and on NumPy
arrays where there is none; the code is the same. Needs scikit-learn for the data, rich and matplotlib for the eye.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np

try:
    import matplotlib
    from rich.progress import track
    from sklearn.datasets import load_digits

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
except ModuleNotFoundError as error:
    sys.exit(f"train_digits: needs {error.name}: pip install scikit-learn rich matplotlib")

import gsbn

CURVES = Path(__file__).resolve().parents[1] / "build" / "digits.png"  # in a folder that git ignores


def arrays_module(device: str) -> Any:
    """CuPy if it sees a GPU, else NumPy."""
    if device != "cpu":
        try:
            import cupy

            if cupy.cuda.runtime.getDeviceCount():
                return cupy
        except ModuleNotFoundError:
            if device == "gpu":
                sys.exit("train_digits: needs CuPy on a GPU: pip install 'cupy-cuda12x[ctk]' or 'cupy-cuda13x[ctk]'")
        except Exception as error:
            if device == "gpu":
                sys.exit(f"train_digits: no GPU to train on: {error}")
    return np


class Layer:
    """``BatchNorm1d(Linear(x) * scale)`` with its parameters, their momenta and its statistics."""

    def __init__(self, xp: Any, rng: np.random.Generator, inputs: int, features: int) -> None:
        weight = rng.uniform(-1, 1, (features, inputs)) / np.sqrt(inputs)
        start = {"weight": weight, "scale": np.ones(features), "gamma": np.ones(features), "beta": np.zeros(features)}
        self.parameters = {name: xp.asarray(a, np.float32) for name, a in start.items()}
        self.velocity = {name: xp.zeros_like(a) for name, a in self.parameters.items()}
        self.statistics = {"running_mean": xp.zeros(features, np.float32), "running_var": xp.ones(features, np.float32)}

    def forward(self, x: Any, training: bool) -> Any:
        y, self.saved = gsbn.forward(x, **self.parameters, **self.statistics, training=training, return_saved=True)
        return y

    def backward(self, dy: Any, rate: float, need_x: bool) -> Any:
        """Step down the gradient, and return that of the input."""
        names = (*self.parameters, "x") if need_x else tuple(self.parameters)
        gradients = gsbn.backward(dy, self.saved, needs=names)
        for name, parameter in self.parameters.items():
            self.velocity[name] = 0.9 * self.velocity[name] - rate * getattr(gradients, name)
            parameter += self.velocity[name]
        return gradients.x


def forward(xp: Any, layers: list[Layer], x: Any, training: bool) -> tuple[Any, list[Any]]:
    """The logits, and what came out of every layer."""
    outputs = []
    for layer in layers:
        x = layer.forward(xp.maximum(x, 0) if outputs else x, training)
        outputs.append(x)
    return x, outputs


def step(xp: Any, layers: list[Layer], x: Any, labels: Any, rate: float) -> float:
    """One batch: the mean cross entropy before it."""
    logits, outputs = forward(xp, layers, x, training=True)
    p = xp.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    at = xp.arange(len(x)), labels
    loss = -xp.log(p[at]).mean()
    p[at] -= 1
    dy = p / np.float32(len(x))
    for i in reversed(range(len(layers))):
        dx = layers[i].backward(dy, rate, need_x=i > 0)
        dy = dx * (outputs[i - 1] > 0) if i > 0 else None
    return float(loss)


def accuracy(xp: Any, layers: list[Layer], x: Any, labels: Any) -> float:
    """The share of right answers, with the running statistics."""
    logits, _ = forward(xp, layers, x, training=False)
    return float((logits.argmax(1) == labels).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--device", choices=["auto", "cpu", "gpu"], default="auto")
    parser.add_argument("--plot", type=Path, default=CURVES, help="where the learning curves are saved")
    options = parser.parse_args()
    xp = arrays_module(options.device)

    rng, data = np.random.default_rng(0), load_digits()
    order = rng.permutation(len(data.data))
    x, labels = xp.asarray(data.data[order] / 16, np.float32), xp.asarray(data.target[order])
    train_x, test_x, train_labels, test_labels = x[360:], x[:360], labels[360:], labels[:360]
    layers = [Layer(xp, rng, *sizes) for sizes in ((64, 128), (128, 128), (128, 10))]

    curves: dict[str, list[float]] = {"loss": [], "training accuracy": [], "test accuracy": []}
    for epoch in track(range(options.epochs), description=f"training with {xp.__name__}"):
        rate = 0.05 * (1 + math.cos(math.pi * epoch / options.epochs))  # from 0.1 to nothing
        shuffled = xp.asarray(rng.permutation(len(train_x)))
        losses = []
        for start in range(0, len(shuffled) - 127, 128):
            batch = shuffled[start : start + 128]
            losses.append(step(xp, layers, train_x[batch], train_labels[batch], rate))
        curves["loss"].append(float(np.mean(losses)))
        curves["training accuracy"].append(accuracy(xp, layers, train_x, train_labels))
        curves["test accuracy"].append(accuracy(xp, layers, test_x, test_labels))

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    for name, curve in curves.items():
        axis = left if name == "loss" else right
        axis.plot(range(1, len(curve) + 1), curve, label=name)
    left.set(xlabel="epoch", ylabel="cross entropy", yscale="log")
    right.set(xlabel="epoch", ylabel="share of right answers")
    right.legend()
    options.plot.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.plot, dpi=120)
    print(f"test accuracy {curves['test accuracy'][-1]:.1%} after {options.epochs} epochs; curves in {options.plot}")


if __name__ == "__main__":
    main()
