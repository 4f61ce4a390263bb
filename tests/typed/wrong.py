"""Calls that a type checker refuses; one that it takes is an error, an ignore without need. None is ever made here.

tests/project/test_typed.py makes them, one line after the other: gsbn refuses each as well.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

import gsbn


def wrong(x: NDArray[np.float32], w: NDArray[np.float32], s: NDArray[np.float32], saved: gsbn.Saved) -> None:
    gsbn.forward(x, w, s, training=True, precision="medium")  # type: ignore[call-overload]  # pyright: ignore
    gsbn.forward(x, w, s, training=True, gemm="sm80")  # type: ignore[call-overload]  # pyright: ignore
    gsbn.forward(x, w, s, training=True, activation="tanh")  # type: ignore[call-overload]  # pyright: ignore
    gsbn.forward(x, w, s, training=True, activation=("gelu", 0.5))  # type: ignore[arg-type]  # pyright: ignore
    gsbn.forward(x, w, s, training=True, activation=True)  # type: ignore[call-overload]  # pyright: ignore
    gsbn.forward(x, w, "2", training=True)  # type: ignore[call-overload]  # pyright: ignore
    gsbn.fold(w, s, s, s, activation="relu")  # type: ignore[call-overload]  # pyright: ignore
    gsbn.forward(x, w, s, training="yes")  # type: ignore[call-overload]  # pyright: ignore
    gsbn.forward(x, w, s, training=True, momentum="0.1")  # type: ignore[call-overload]  # pyright: ignore
    gsbn.forward(x, w, s, training=True, eps=None)  # type: ignore[call-overload]  # pyright: ignore
    gsbn.forward(x, w, s, training=True, sms=0.5)  # type: ignore[call-overload]  # pyright: ignore
    gsbn.forward(x, w, s, training=True, return_saved="y")  # type: ignore[call-overload]  # pyright: ignore
    gsbn.forward(x, w, s, training=True, affine=True)  # type: ignore[call-overload]  # pyright: ignore
    gsbn.forward(x, w, s, s, training=True)  # type: ignore[call-overload]  # pyright: ignore
    gsbn.forward(x, w, s, training=True, bias=0.5)  # type: ignore[call-overload]  # pyright: ignore
    gsbn.forward(x, w, s, training=True, out=[[0.0]])  # type: ignore[call-overload]  # pyright: ignore
    gsbn.forward([[1.0], [2.0]], w, s, training=True)  # type: ignore[call-overload]  # pyright: ignore
    gsbn.forward(None, w, s, training=True)  # type: ignore[call-overload]  # pyright: ignore
    gsbn.backward(x, saved, needs=[0])  # type: ignore[list-item]  # pyright: ignore
    gsbn.backward(x, saved, needs=None)  # type: ignore[call-overload]  # pyright: ignore
    gsbn.backward(x, x)  # type: ignore[call-overload]  # pyright: ignore
    gsbn.fold(w, s, s)  # type: ignore[call-overload]  # pyright: ignore
    gsbn.fold(gsbn.prepare(w), s, s, s)  # type: ignore[call-overload]  # pyright: ignore
    gsbn.prepare(w, "low")  # type: ignore[arg-type]  # pyright: ignore
    gsbn.prepare([[1.0]])  # type: ignore[arg-type]  # pyright: ignore
    gsbn.backward(x, saved).mean()  # type: ignore[attr-defined]  # pyright: ignore
    gsbn.forward(x, w, s, training=True).softmax()  # type: ignore[attr-defined]  # pyright: ignore
