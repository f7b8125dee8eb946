"""Packs 2:4 sparse NVFP4 weights for nibble's GPU kernel, and says what that saves."""

from __future__ import annotations

from typing import Any

import torch
from nibble_kernels.nvfp4_sparse import NotSparseError, SparseWeight, pack_sparse
from vllm.logger import init_logger

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
