"""What one layer of a model keeps in memory for each sequence: keys and values, or a state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Config = Mapping[str, Any]
Kind = Literal["full", "sliding", "mla", "state", "shared", "none"]


@dataclass(frozen=True)
class State:
    """Recurrent state of a Mamba, Mamba2, gated delta net or short convolution layer: constant per
    sequence.

    `conv_channels` + 2 * `group_size` * groups channels of `conv_rows` in the model's type, and
    `temporal_elements` of `temporal_bytes` each (None: the model's type). All are divided by tensor
    parallelism; groups that do not divide are replicated up to one a rank.
    """

    flavor: Literal["mamba1", "mamba2", "gdn", "short_conv"]
    conv_channels: int
    conv_rows: int
    temporal_elements: int = 0
    temporal_bytes: int | None = None
    groups: int = 0
    group_size: int = 0
    grows_with_speculation: bool = True


@dataclass(frozen=True)
class LayerMemory:
    """What one layer keeps for a sequence.

    `num_kv_heads` and `head_dim`s (K, V) are of the whole model; MLA keeps one vector of `head_dim`
    = latent + rope a token and no V. `window` in tokens for "sliding"; `shares_with` is the layer
    whose cache a "shared" one reads. Draft (MTP) layers count only with speculative decoding.
    """

    index: int
    kind: Kind
    num_kv_heads: int = 0
    head_dim: int = 0
    head_dim_v: int = 0
    window: int | None = None
    shares_with: int | None = None
    state: State | None = None
    is_draft: bool = False

    @property
    def is_delta_net(self) -> bool:
        """Whether it is linear attention with the gated delta rule."""
        return self.state is not None and self.state.flavor == "gdn"


Layers = tuple[LayerMemory, ...]
