"""Runs transformers' module of an architecture with the weights of one layer in memory at a time.

The module is created on the `meta` device. Decoder layers and parts of the output head are the
units of lockstep.py: loaded when the first pass enters, freed after the last pass has left. Stacked
experts are read when the router chooses them, and only the used rows of embeddings are read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from nibble.checkpoint import Checkpoint
from nibble.reference.lockstep import Lockstep
from nibble.reference.mapping import Source, as_parameter, missing, sources_of
from nibble.reference.weights import BY_TOKEN, INPUT, Unsupported, Weights, rounded_input

HEAD_ROWS = 16384  # rows of the output head in one unit


class RoundedInputs(TorchFunctionMode):
    """A mode in which inputs of quantized weights are rounded as a server's kernels round them.

    The weight's attribute INPUT says how. Weights without it leave their inputs unrounded.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_product = func is torch.nn.functional.linear and len(args) > 1
        rounding = getattr(args[1], INPUT, None) if is_product else None
        if rounding is not None and rounding[0] != BY_TOKEN:
            args = (rounded_input(args[0], rounding), *args[1:])
        return func(*args, **(kwargs or {}))


class InBf16(TorchFunctionMode):
    """A mode in which products have BF16 inputs and outputs, as in a server.

    FP8 weights change sides: inputs that RoundedInputs rounds to FP8 stay in BF16, and inputs that
    it leaves unrounded are rounded by token. The difference measures what a server may choose.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.nn.functional.linear:
            return func(*args, **(kwargs or {}))
        x, weight, *rest = args
        kind, scale = getattr(weight, INPUT, None) or ("", 0.0)
        value = rounded_input(x, (kind, scale)) if kind == BY_TOKEN else x.bfloat16().to(x.dtype)
        if kind == "fp8":
            weight = weight.detach()  # a copy without INPUT, which RoundedInputs leaves alone
        return func(value, weight, *rest, **(kwargs or {})).bfloat16().to(x.dtype)


class LazyExperts:
    """Replaces a stacked parameter of experts: an index reads that expert's weights.

    Each expert is read once until `forget`.
    """

    def __init__(
        self,
        source: Source,
        weights: Weights,
        config: Any,
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> None:
        self._source, self._weights, self._config, self.shape = source, weights, config, shape
        self.dtype = dtype
        self._read: dict[int, Tensor] = {}

    def __getitem__(self, index: Any) -> Tensor:
        expert = int(index)
        if expert not in self._read:
            value = self._source.load_expert(self._weights, expert, self._config)
            if tuple(value.shape) != self.shape[1:] and tuple(value.T.shape) == self.shape[1:]:
                rounding, value = getattr(value, INPUT, None), value.T
                if rounding is not None:
                    setattr(value, INPUT, rounding)
            self._read[expert] = value
        return self._read[expert]

    def forget(self) -> None:
        """Free the experts that were read."""
        self._read.clear()


class StreamedModel:
    """`module` computes as if it were loaded, inside the functions given to `passes`.

    dtype: of the computation; keeps: units stay in memory after their first use.
    Raises Unsupported if transformers has no module for the architecture, or if the checkpoint
    lacks a parameter.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        weights: Weights,
        dtype: torch.dtype,
        device: torch.device,
        keeps: bool,
    ) -> None:
        self.checkpoint, self.dtype, self.device, self.keeps = checkpoint, dtype, device, keeps
        self._weights = weights
        self.module = make_module(checkpoint, dtype)
        self.config = self.module.config
        self._sources = sources_of(self.module, weights)
        if absent := missing(self.module, self._sources):
            absent = [name for name in absent if not _is_tower(name)]
            if absent:
                raise Unsupported(
                    f"the checkpoint has no tensor for {absent[0]} ({len(absent)} such parameters)"
                )
        self.layers = decoder_layers(self.module)
        names = {module: name for name, module in self.module.named_modules()}
        self.layer_names = tuple(names[layer] for layer in self.layers)
        self._experts: dict[str, list[LazyExperts]] = {}
        self._loaded: set[str] = set()
        self._head_rows: dict[str, tuple[Source, int, int]] = {}  # unit -> tensor, first row, end
        self._head_weights: dict[str, Tensor] = {}
        self._steps: Lockstep | None = None
        self.on_unit: Callable[[str], None] = lambda name: None
        self._prepare()

    def passes(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """The functions' results. Each runs in a thread, without gradients, in RoundedInputs."""

        def in_modes(function: Callable[[], Any]) -> Callable[[], Any]:
            def run() -> Any:
                with torch.no_grad(), RoundedInputs():
                    return function()

            return run

        self._steps = Lockstep(self._load, self._free)
        return self._steps.run([in_modes(function) for function in functions])

    # --- hooks ---

    def _prepare(self) -> None:
        _fill_buffers(self.module, self.device, self._sources.keys())
        names = {module: name for name, module in self.module.named_modules()}
        inside = {child for layer in self.layers for child in layer.modules()}
        for layer in self.layers:
            self._experts[names[layer]] = self._lazy_experts(layer, names)
            layer.register_forward_pre_hook(self._enter(names[layer]))
        head = self.module.get_output_embeddings()
        for module, name in names.items():
            if module in inside or module is head:
                continue
            if isinstance(module, nn.Embedding):
                module.register_forward_pre_hook(self._embed(name))
            elif any(True for _ in module.parameters(recurse=False)):
                module.register_forward_pre_hook(self._enter(name))
        head.forward = self._head(names[head], head)

    def _enter(self, name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any) -> None:
            assert self._steps is not None
            self._steps.arrive(name)

        return hook

    def _lazy_experts(self, layer: nn.Module, names: dict[nn.Module, str]) -> list[LazyExperts]:
        """Replace the stacked parameters of `layer` by LazyExperts."""
        replaced = []
        for module in layer.modules():
            for leaf, value in list(module.named_parameters(recurse=False)):
                source = self._sources.get(f"{names[module]}.{leaf}")
                if value.ndim != 3 or source is None or "experts" not in names[module]:
                    continue
                del module._parameters[leaf]
                lazy = LazyExperts(
                    source, self._weights, self.config, tuple(value.shape), self.dtype
                )
                object.__setattr__(module, leaf, lazy)
                replaced.append(lazy)
        return replaced

    def _embed(self, name: str) -> Callable[..., Any]:
        """A hook that loads only the rows of the pass's tokens, and renumbers the tokens."""

        def hook(module: Any, args: Any) -> Any:
            rows, places = args[0].unique(return_inverse=True)
            source = self._source(f"{name}.weight")
            value = torch.cat([self._rows(source, int(row), int(row) + 1) for row in rows])
            module.padding_idx = None
            module._parameters["weight"] = nn.Parameter(value, requires_grad=False)
            return (places, *args[1:])

        return hook

    def _head(self, name: str, head: Any) -> Callable[[Tensor], Tensor]:
        """A `forward` that computes the logits in parts of HEAD_ROWS, each a unit.

        All passes share one read of each part, and the head is never in memory as a whole unless
        weights are kept.
        """
        source = self._source(f"{name}.weight")
        rows = self._weights.shape(source.parts[0][1])[0]
        for start in range(0, rows, HEAD_ROWS):
            self._head_rows[f"{name}.{start}"] = (source, start, min(rows, start + HEAD_ROWS))

        def forward(x: Tensor) -> Tensor:
            assert self._steps is not None
            parts = []
            for unit in self._head_rows:
                self._steps.arrive(unit)
                parts.append(nn.functional.linear(x, self._head_weights[unit]))
            logits = torch.cat(parts, -1)
            bias = self._sources.get(f"{name}.bias")
            return logits if bias is None else logits + bias.load(self._weights, self.config)

        return forward

    def _rows(self, source: Source, start: int, stop: int) -> Tensor:
        return self._weights.load(source.parts[0][1], start, stop)

    def _source(self, name: str) -> Source:
        return self._sources.get(name) or self._sources[self.module.all_tied_weights_keys[name]]

    # --- units ---

    def _load(self, unit: str) -> None:
        if unit in self._loaded:
            return
        self.on_unit(unit)
        if unit in self._head_rows:
            self._head_weights[unit] = self._rows(*self._head_rows[unit])
            self._loaded.add(unit)
            return
        module = self.module.get_submodule(unit)
        is_layer = unit in self._experts
        for name, owner in module.named_modules() if is_layer else [("", module)]:
            prefix = f"{unit}.{name}" if name else unit
            for leaf, value in [
                *owner.named_parameters(recurse=False),
                *owner.named_buffers(recurse=False),
            ]:
                source = self._sources.get(f"{prefix}.{leaf}")
                if source is None:
                    continue
                loaded = source.load(self._weights, self.config)
                if loaded.shape != value.shape:
                    raise Unsupported(
                        f"{prefix}.{leaf} has shape {list(loaded.shape)}, expected"
                        f" {list(value.shape)}"
                    )
                if leaf in owner._buffers:
                    owner._buffers[leaf] = loaded
                else:
                    owner._parameters[leaf] = as_parameter(loaded)
        self._loaded.add(unit)

    def _free(self, unit: str) -> None:
        if self.keeps:
            return
        if unit in self._head_rows:
            del self._head_weights[unit]
            self._loaded.discard(unit)
            return
        for lazy in self._experts.get(unit, ()):
            lazy.forget()
        module = self.module.get_submodule(unit)
        for owner in module.modules() if unit in self._experts else [module]:
            for leaf, value in list(owner.named_parameters(recurse=False)):
                empty = torch.empty(value.shape, dtype=value.dtype, device="meta")
                owner._parameters[leaf] = nn.Parameter(empty, requires_grad=False)
        self._loaded.discard(unit)


_BUILDING = threading.Lock()  # _from_config sets torch's default dtype for the whole process


def make_module(checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    """The checkpoint's architecture as transformers' module, on the meta device.

    Raises Unsupported if transformers does not have it or it does not generate text.
    """
    import transformers
    from transformers import AutoConfig

    transformers.logging.set_verbosity_error()
    name = str(checkpoint.architecture)
    architecture: Any = getattr(transformers, name, None)
    if architecture is None:
        code = "; nibble does not run the checkpoint's code" if checkpoint.custom_code else ""
        raise Unsupported(f"transformers {transformers.__version__} has no module {name}{code}")
    config: Any = AutoConfig.from_pretrained(str(checkpoint.path), trust_remote_code=False)
    if not isinstance(config, architecture.config_class):
        raise Unsupported(f"config.json describes another model than {name}")
    for part in (config, config.get_text_config()):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    with _BUILDING, torch.device("meta"):
        module = architecture._from_config(config, dtype=dtype, attn_implementation="eager")
    if hasattr(module, "set_experts_implementation"):
        module.set_experts_implementation("eager")
    if module.get_output_embeddings() is None:
        raise Unsupported(f"{name} generates no text")
    return module.eval()


def decoder_layers(module: Any) -> list[nn.Module]:
    """The layers of the text model, first to last. Raises Unsupported if there is no list."""
    count = module.config.get_text_config().num_hidden_layers
    decoder = module.get_decoder() if hasattr(module, "get_decoder") else module
    modules = (module for module in decoder.modules() if isinstance(module, nn.ModuleList))
    lists = [modules_list for modules_list in modules if len(modules_list) == count]
    if not lists:
        raise Unsupported(f"{type(module).__name__} has no list of its {count} layers")
    return list(lists[0])


def _is_tower(name: str) -> bool:
    """Whether a parameter is for images, sound or drafts, which a pass over text does not use."""
    towers = ("visual", "vision", "audio", "multi_modal", "image", "mtp")
    return any(part in name for part in towers)


def _fill_buffers(module: Any, device: torch.device, stored: Collection[str]) -> None:
    """Compute the buffers that no checkpoint stores: rotary frequencies, scales of embeddings.

    transformers computes them after a load: `_init_weights` of the nearest model around the module
    fills most of them, and some (Falcon-H1's multipliers) only when called with the model itself.
    Raises Unsupported for a buffer that stays without values.
    """
    from transformers import PreTrainedModel

    models = [model for model in module.modules() if isinstance(model, PreTrainedModel)]
    # Inner models come later in `models` and overwrite outer ones.
    nearest = {owner: model for model in models for owner in model.modules()}
    owners = [
        owner for owner in module.modules() if any(True for _ in owner.buffers(recurse=False))
    ]
    for owner in owners:
        for leaf, value in dict(owner.named_buffers(recurse=False)).items():
            blank = torch.empty_like(value, device=device)
            owner._buffers[leaf] = blank.fill_(torch.nan) if blank.is_floating_point() else blank
    for owner in dict.fromkeys([*owners, *models]):
        nearest[owner]._init_weights(owner)
    for name, value in module.named_buffers():
        if (
            name not in stored
            and not _is_tower(name)
            and value.is_floating_point()
            and value.isnan().any()
        ):
            raise Unsupported(f"transformers leaves {name} without values")
