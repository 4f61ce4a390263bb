"""KernelBench level 2, problem 33 (Gemm_Scale_BatchNorm), with gsbn.forward in place of the three operators.

KernelBench's evaluator executes this text in a namespace that already holds the original `Model`, with torch seeded;
`kernelbench.py`, which holds `ModelNew`, must be on its path: PYTHONPATH=examples. ModelNew creates the same parameters
in the same order as Model, and its running statistics stay in the module's state.
As a script, the file makes the evaluator's check against the three operators, and prints the largest difference.
"""

from kernelbench import ModelNew, check, torch  # noqa: F401, the evaluator takes ModelNew from here

batch_size = 1024
in_features = 8192
out_features = 8192
scale_shape = (out_features,)


def get_inputs():
    return [torch.rand(batch_size, in_features)]


def get_init_inputs():
    return [in_features, out_features, scale_shape]


if __name__ == "__main__":
    check(batch_size, *get_init_inputs())
