"""Faults that a trial plants in a kernel, to show that each is found and named."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

import torch
from torch import Tensor

from nibble.trials.trial import Fault

Product = Callable[[Tensor], Tensor]
FOREVER_CYCLES = 1 << 62  # of a GPU's clock


def with_fault(product: Product, fault: Fault | None) -> Product:
    """The product, or one with the fault."""
    if fault is None:
        return product
    return {"hang": _hang, "wrong": _wrong, "nan": _nan, "crash": _crash}[fault](product)


def _hang(product: Product) -> Product:
    def call(x: Tensor) -> Tensor:
        if x.is_cuda:
            torch.cuda._sleep(FOREVER_CYCLES)  # pyright: ignore[reportPrivateUsage]
        else:
            time.sleep(3600)
        return product(x)

    return call


def _wrong(product: Product) -> Product:
    """One result of a tile is another one's, as with an exchanged row."""

    def call(x: Tensor) -> Tensor:
        y = product(x).clone()
        y[..., 0] = y[..., 1]
        return y

    return call


def _nan(product: Product) -> Product:
    def call(x: Tensor) -> Tensor:
        y = product(x).clone()
        y[..., -1] = float("nan")
        return y

    return call


def _crash(product: Product) -> Product:
    """A fault of the CUDA context, which ends every later call; on the CPU a wrong address."""

    def call(x: Tensor) -> Tensor:
        if x.is_cuda:
            beyond = torch.tensor([1 << 20], device=x.device)
            x[..., 0].index_select(-1, beyond)
            torch.cuda.synchronize()
        else:
            ctypes.string_at(8)
        return product(x)

    return call
