"""Runs transformers' module of an architecture with only one layer's weights in memory.

The module is made on the `meta` device. Decoder layers and parts of the output head are units of
Lockstep: loaded when the first pass enters one, freed after the last has left it. Stacked experts
are read when they are chosen, embeddings by the rows in use.
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

HEAD_ROWS = 16384


class RoundedInputs(TorchFunctionMode):
    """Within it, what is multiplied with a weight that says how is rounded as kernels for
    quantized activations round it.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_product = func is torch.nn.functional.linear and len(args) > 1
        how = getattr(args[1], INPUT, None) if is_product else None
        if how is not None and how[0] != BY_TOKEN:
            args = (rounded_input(args[0], how), *args[1:])
        return func(*args, **(kwargs or {}))


class InBf16(TorchFunctionMode):
    """Within it, products take and give BF16, as a server's do, and those of FP8 weights are
    rounded where they were not.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.nn.functional.linear:
            return func(*args, **(kwargs or {}))
        x, weight, *rest = args
        kind, scale = getattr(weight, INPUT, None) or ("", 0.0)
        value = rounded_input(x, (kind, scale)) if kind == BY_TOKEN else x.bfloat16().to(x.dtype)
        if kind == "fp8":
            weight = weight.detach()  # which has no INPUT
        return func(value, weight, *rest, **(kwargs or {})).bfloat16().to(x.dtype)


class LazyExperts:
    """Stands where a stacked parameter was: an index reads that expert, once for a layer."""

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
                how, value = getattr(value, INPUT, None), value.T
                if how is not None:
                    setattr(value, INPUT, how)
            self._read[expert] = value
        return self._read[expert]

    def forget(self) -> None:
        self._read.clear()


class StreamedModel:
    """`passes` runs functions of the module in lockstep; within them `module` computes as if it
    were loaded.

    `keeps`: units stay in memory once they were read. Raises Unsupported for what transformers has
    no module of.
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
        self._head_rows: dict[
            str, tuple[Source, int, int]
        ] = {}  # unit -> which rows of which tensor
        self._head_weights: dict[str, Tensor] = {}
        self._steps: Lockstep | None = None
        self.on_unit: Callable[[str], None] = lambda name: None
        self._prepare()

    def passes(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """Results of the functions, each called in a thread, without gradients and with rounded
        inputs.
        """

        def ready(function: Callable[[], Any]) -> Callable[[], Any]:
            def run() -> Any:
                with torch.no_grad(), RoundedInputs():
                    return function()

            return run

        self._steps = Lockstep(self._load, self._free)
        return self._steps.run([ready(function) for function in functions])

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
        """Takes the stacked parameters out of `layer`."""
        found = []
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
                found.append(lazy)
        return found

    def _embed(self, name: str) -> Callable[..., Any]:
        """Reads the rows in use and numbers them anew."""

        def hook(module: Any, args: Any) -> Any:
            rows, places = args[0].unique(return_inverse=True)
            source = self._source(f"{name}.weight")
            value = torch.cat([self._rows(source, int(row), int(row) + 1) for row in rows])
            module.padding_idx = None
            module._parameters["weight"] = nn.Parameter(value, requires_grad=False)
            return (places, *args[1:])

        return hook

    def _head(self, name: str, head: Any) -> Callable[[Tensor], Tensor]:
        """Logits in parts, each of them a unit: read once for all passes, and never whole in
        memory unless weights are kept.
        """

        source = self._source(f"{name}.weight")
        rows = self._weights.shape(source.parts[0][1])[0]
        for start in range(0, rows, HEAD_ROWS):
            self._head_rows[f"{name}.{start}"] = (source, start, min(rows, start + HEAD_ROWS))

        def forward(x: Tensor) -> Tensor:
            assert self._steps is not None
            found = []
            for unit in self._head_rows:
                self._steps.arrive(unit)
                found.append(nn.functional.linear(x, self._head_weights[unit]))
            logits = torch.cat(found, -1)
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
                made = source.load(self._weights, self.config)
                if made.shape != value.shape:
                    raise Unsupported(
                        f"{prefix}.{leaf} has shape {list(made.shape)}, {list(value.shape)} is due"
                    )
                if leaf in owner._buffers:
                    owner._buffers[leaf] = made
                else:
                    owner._parameters[leaf] = as_parameter(made)
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


_BUILDING = threading.Lock()


def make_module(checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    """The architecture's class on the meta device. Raises Unsupported."""
    import transformers
    from transformers import AutoConfig

    transformers.logging.set_verbosity_error()
    name = str(checkpoint.architecture)
    found: Any = getattr(transformers, name, None)
    if found is None:
        code = "; nibble does not run the checkpoint's code" if checkpoint.custom_code else ""
        raise Unsupported(f"transformers {transformers.__version__} has no module {name}{code}")
    config: Any = AutoConfig.from_pretrained(str(checkpoint.path), trust_remote_code=False)
    if not isinstance(config, found.config_class):
        raise Unsupported(f"config.json describes another model than {name}")
    for one in (config, config.get_text_config()):
        if hasattr(one, "quantization_config"):
            del one.quantization_config
    with _BUILDING, torch.device("meta"):
        module = found._from_config(config, dtype=dtype, attn_implementation="eager")
    if hasattr(module, "set_experts_implementation"):
        module.set_experts_implementation("eager")
    if module.get_output_embeddings() is None:
        raise Unsupported(f"{name} generates no text")
    return module.eval()


def decoder_layers(module: Any) -> list[nn.Module]:
    """The layers of the text model, first to last."""
    count = module.config.get_text_config().num_hidden_layers
    decoder = module.get_decoder() if hasattr(module, "get_decoder") else module
    lists = [
        one for one in decoder.modules() if isinstance(one, nn.ModuleList) and len(one) == count
    ]
    if not lists:
        raise Unsupported(f"{type(module).__name__} has no list of its {count} layers")
    return list(lists[0])


def _is_tower(name: str) -> bool:
    """Parameters for images and sound, which a text never meets."""
    return any(
        part in name for part in ("visual", "vision", "audio", "multi_modal", "image", "mtp")
    )


def _fill_buffers(module: Any, device: torch.device, stored: Collection[str]) -> None:
    """Buffers that no checkpoint has (rotary frequencies, scales of embeddings), as transformers
    makes them after a load: some by their owner, others by the model around it (Falcon-H1's
    multipliers). Raises Unsupported where neither does.
    """
    from transformers import PreTrainedModel

    models = [one for one in module.modules() if isinstance(one, PreTrainedModel)]
    nearest = {
        owner: model for model in models for owner in model.modules()
    }  # inner models come later
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
