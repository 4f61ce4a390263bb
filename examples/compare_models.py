"""How much faster do published heads get, and how far are their results from PyTorch's? `gsbn.torch.compare` says.

python examples/compare_models.py                      two heads, in float32 and under autocast in bfloat16
python examples/compare_models.py --rows 512           with as many rows; 2048 on a GPU if you say nothing
gsbn bench --model compare_models:barlow_twins         one of them from the shell, in this folder

The heads are SimSiam's projector and predictor (Chen and He 2021, published_head.py) and Barlow Twins' projector
(Zbontar et al. 2021, as lightly has it), at the papers' widths on a GPU. A CPU is for tests: there they are small and
run PyTorch's own modules.
"""

import argparse
import importlib.util
import sys

try:
    import torch
    from published_head import Twins
    from torch import nn
except ModuleNotFoundError as error:
    sys.exit(f"compare_models: needs {error.name}: pip install torch")

import gsbn.torch

ON_GPU = torch.cuda.is_available()
DEVICE, ROWS, WIDTH = ("cuda", 2048, 2048) if ON_GPU else ("cpu", 64, 64)


def simsiam(rows=ROWS):
    """The model and two views of a batch."""
    torch.manual_seed(0)
    return Twins(WIDTH, WIDTH, WIDTH, WIDTH // 4).to(DEVICE), tuple(torch.randn(2, rows, WIDTH, device=DEVICE))


def barlow_twins(rows=ROWS):
    """The model and a batch of an encoder's features."""
    torch.manual_seed(0)
    wide = 4 * WIDTH
    hidden = [[nn.Linear(k, wide, bias=False), nn.BatchNorm1d(wide), nn.ReLU()] for k in (WIDTH, wide)]
    head = nn.Sequential(*hidden[0], *hidden[1], nn.Linear(wide, wide, bias=False))
    return head.to(DEVICE), (torch.randn(rows, WIDTH, device=DEVICE),)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=ON_GPU, help="torch.compile, too")
    parser.add_argument("--seconds", type=float, default=1.0 if ON_GPU else 0.05, help="for each way to call a model")
    options = parser.parse_args()
    if ON_GPU and importlib.util.find_spec("cupy") is None:
        sys.exit("compare_models: needs CuPy on a GPU: pip install 'cupy-cuda12x[ctk]' or 'cupy-cuda13x[ctk]'")
    for make in (simsiam, barlow_twins):
        for autocast in (None, torch.bfloat16):
            model, inputs = make(options.rows)
            print(f"\n{make.__name__}, {options.rows} rows, {'bfloat16' if autocast else 'float32'}")
            how = {"autocast": autocast, "compile": options.compile, "seconds": options.seconds}
            print(gsbn.torch.compare(model, *inputs, **how))


if __name__ == "__main__":
    main()
