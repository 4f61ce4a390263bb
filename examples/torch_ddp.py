"""One batch on two ranks: nn.SyncBatchNorm run by gsbn under DistributedDataParallel.

torchrun --nproc-per-node 2 examples/torch_ddp.py

A classifier of plain modules is converted by one line. Each rank trains it on its rows of every batch, and beside it,
for comparison, the same classifier with nn.BatchNorm1d on all rows, as one process would. The losses must be the same.
With a GPU for each rank they talk through NCCL; else all is on the CPU, through gloo.
"""

import argparse
import copy
import importlib.util
import os
import sys

if importlib.util.find_spec("torch") is None:
    sys.exit("torch_ddp: needs PyTorch: pip install torch")
import torch
import torch.distributed.nn  # now: a later import, as DistributedDataParallel's, would keep the process group for ever
from torch import distributed, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import gsbn.torch

INPUTS, CLASSES = 32, 10
# In float64 the sums of a step, of a few hundred numbers near 1, err by less than 1e-13, and none of ten steps more
# than doubles what was there before.
TOLERANCE = 1e-10


def classifier(width):
    torch.manual_seed(0)
    first, second = ((nn.Linear(i, width), nn.BatchNorm1d(width), nn.ReLU()) for i in (INPUTS, width))
    return nn.Sequential(*first, *second, nn.Linear(width, CLASSES)).double()


def train(model, device, rows, mine, steps=10):
    """The mean loss over `mine`, of all rows of a batch, at every step of SGD."""
    draw = torch.Generator().manual_seed(1)
    centres = torch.randn(CLASSES, INPUTS, generator=draw, dtype=torch.float64)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(steps):
        labels = torch.randint(CLASSES, (rows,), generator=draw)
        x = centres[labels] + torch.randn(rows, INPUTS, generator=draw, dtype=torch.float64)
        loss = cross_entropy(model(x[mine].to(device)), labels[mine].to(device))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=64, help="of a batch, on each rank")
    parser.add_argument("--width", type=int, default=128)
    options = parser.parse_args()
    if torch.cuda.is_available() and importlib.util.find_spec("cupy") is None:
        sys.exit("torch_ddp: needs CuPy on a GPU: pip install 'cupy-cuda12x[ctk]' or 'cupy-cuda13x[ctk]'")
    if "RANK" not in os.environ:
        sys.exit("torch_ddp: start it by: torchrun --nproc-per-node 2 examples/torch_ddp.py")
    local = int(os.environ["LOCAL_RANK"])
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if on_gpus else "gloo")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()

    plain = classifier(options.width).to(device)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))
    report = gsbn.torch.convert(model)  # the one line
    assert len(report.replaced) == 2 and not report.left

    rows = options.rows * ranks
    alone = train(plain, device, rows, slice(rows)).cpu()
    mine = slice(rank * options.rows, (rank + 1) * options.rows)
    shared = train(DistributedDataParallel(model), device, rows, mine)
    distributed.all_reduce(shared)  # as many rows on every rank: the mean of their losses is the batch's
    shared = shared.cpu() / ranks

    if rank == 0:
        print(report)
        print(f"{device.type}, {ranks} ranks by {distributed.get_backend()}: {options.rows} rows each")
        print("step     one process     all ranks  difference")
        for step, (one, all_) in enumerate(zip(alone.tolist(), shared.tolist(), strict=True)):
            print(f"{step:4}  {one:14.12f} {all_:14.12f}  {abs(one - all_):.1e}")
    distributed.destroy_process_group()
    furthest = (alone - shared).abs().max().item()
    assert furthest <= TOLERANCE, f"the ranks compute something else than one process: {furthest:.1e} apart"
    assert shared[-1] < shared[0] / 2, "nothing was learnt"


if __name__ == "__main__":
    main()
