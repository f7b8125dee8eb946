"""Packs 2:4 sparse NVFP4 weights for nibble's GPU kernel, and says what that saves."""

from __future__ import annotations

from typing import Any

import torch
from nibble_kernels.nvfp4_sparse import NotSparseError, SparseWeight, pack_sparse
from nibble_kernels.nvfp4_sparse.weight import share_that_is_not_sparse
from torch import Tensor
from vllm.logger import init_logger

from nibble.engine.plugin.layers import name_of

logger = init_logger(f"vllm.{__name__}")


def pack_if_sparse(layer: Any, dtype: torch.dtype) -> SparseWeight | None:
    """The layer's weight in 7/9 of its bytes; None if it is not exactly 2:4 sparse. Raises
    ValueError for a weight that the dense kernel refuses too.
    """
    name = getattr(layer, "prefix", "a layer")
    codes, scales = layer.weight.data, layer.weight_scale.data
    try:
        packed = pack_sparse(codes, scales, native=dtype == torch.float16)
    except NotSparseError as error:
        logger.warning("%s stays dense: %s", name, error)
        return None
    after = sum(tensor.nbytes for tensor in packed[:3])
    logger.info(
        "%s is 2:4 sparse: %d bytes instead of %d (%d saved)",
        name,
        after,
        codes.nbytes + scales.nbytes,
        codes.nbytes + scales.nbytes - after,
    )
    return packed


def keep_experts_dense(layer: Any, weights: dict[str, Tensor]) -> None:
    """Check each expert of each weight, codes [E, N, K/2], and say that all stay dense: no kernel
    here reads 2:4 sparse experts. A group of four with three codes that are not zero is never cut.
    """
    for name, codes in weights.items():
        shares = [share_that_is_not_sparse(expert) for expert in codes]
        count = sum(share == 0 for share in shares)
        logger.warning(
            "%s.%s stays dense: %d of %d experts are exactly 2:4 sparse (in the others"
            " up to %.2f %% of the groups are not), and nibble's experts have no sparse kernel",
            *(name_of(layer), name, count, len(shares), 100 * max(shares)),
        )
