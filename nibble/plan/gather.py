"""Reads arguments, environment and files into a plan: the effects around `resolve.make_plan`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nibble.checkpoint import Checkpoint, read_checkpoint
from nibble.checkpoint.chat_template import chat_template
from nibble.engine.flags import check_flags, read_flags, split_words
from nibble.engine.installed import (
    compiled_id,
    missing_gpu_kernels,
    missing_plugin,
    vllm_version,
)
from nibble.engine.schema import load_schema
from nibble.errors import ExitCode, NibbleError
from nibble.hub.packaged import DEFAULT_MODEL, EMBEDDED_MODEL, PACKAGED, packaged_here
from nibble.hub.transfer import STALL_VARIABLE
from nibble.machine.disk import is_folder
from nibble.machine.hardware import Hardware, assume, detect
from nibble.machine.host import has_cpp_compiler, shm_free_bytes
from nibble.machine.paths import cache_dir, demo_models, root
from nibble.machine.targets import TARGET_NAMES, Target, load_target, target_for_capability
from nibble.plan.choice import Choice
from nibble.plan.inputs import LocalFiles, PlanInputs
from nibble.plan.layers import file_flags
from nibble.plan.models.gemma4 import has_flashinfer_compiler
from nibble.plan.moe_tuning import installed_configs
from nibble.plan.plan import Plan
from nibble.plan.resolve import make_plan
from nibble.recipes.recipe import load_recipe
from nibble.recipes.resolution import ResolvedRecipe, resolve
from nibble.recipes.rules import load_rules
from nibble.settings.command_line import CommandLine, read_command_line
from nibble.settings.environment import Accepted, accept, check_file_environment
from nibble.settings.options import Settings, options
from nibble.settings.sources import DEFAULT, Loaded, check_option, load_settings
from nibble.trials.place import place_of
from nibble.trials.record import Record, open_record

UNKNOWN_UNTIL_PULL = "unknown until pull"
FindCheckpoint = Callable[[str, str | None], tuple[Checkpoint | None, str]]
"""(model, revision) -> (the checkpoint or None, why it is unknown)."""


@dataclass(frozen=True)
class Asked:
    """The user's request, parsed and typed, before any lookup."""

    loaded: Loaded
    accepted: Accepted
    command: CommandLine

    @property
    def settings(self) -> Settings:
        return self.loaded.settings

    @property
    def environ(self) -> dict[str, str]:
        """The environment that vLLM would get without the plan's choices."""
        return {**self.loaded.file_env, **self.accepted.environ}

    @property
    def cache(self) -> Path:
        """nibble's cache folder."""
        return self.settings.cache_dir or cache_dir(self.accepted.environ)


def read_wishes(
    words: Sequence[str], environ: Mapping[str, str], own_switches: Sequence[str] = ()
) -> Asked:
    """Parse command line, environment and user TOML into settings. Raises NibbleError for a value
    that cannot be parsed.
    """
    schema = load_schema()
    accepted = accept(environ, schema.envs, in_image="NIBBLE_IMAGE" in environ)
    command = read_command_line(words, own_switches, schema)
    loaded = load_settings(command.values, accepted.environ)
    return Asked(loaded, accepted, command)


def with_default_model(request: Asked) -> Asked:
    """The request with nibble's default model where it names none. Ranks on several machines have
    no default: a variable that one of them lacks would give it another model.
    """
    settings = request.settings
    spans_machines = settings.node_rank or settings.nnodes or settings.head_ip
    if settings.model is not None or spans_machines or settings.cluster == "ray":
        return request
    return _with_model(request, DEFAULT_MODEL)


def with_embedded_model(request: Asked) -> Asked | None:
    """The request with the embedded demo in place of the default model; None where the user named
    the model.
    """
    is_default = request.loaded.origins["model"] == DEFAULT
    return _with_model(request, EMBEDDED_MODEL) if is_default else None


def _with_model(request: Asked, model: str) -> Asked:
    settings = request.settings.model_copy(update={"model": model})
    return replace(request, loaded=replace(request.loaded, settings=settings))


def local_model(model: str, cache: Path | None = None) -> Path | None:
    """The folder a model argument names: a path, or by its name an embedded demo or a packaged
    model that is in nibble's `cache`.
    """
    if demo := demo_models().get(model):
        return demo
    if model in PACKAGED:
        return packaged_here(model, cache or cache_dir())
    path = Path(os.path.expanduser(model))
    looks_like_path = model.startswith((".", "/", "~")) or is_folder(path)
    return path if looks_like_path else None


def plan_for(
    request: Asked,
    find_checkpoint: FindCheckpoint | None = None,
    local: LocalFiles = LocalFiles(),  # noqa: B008  # frozen
) -> Plan:
    """The plan for the request. Raises USAGE without a model, and what `make_plan` raises.

    `find_checkpoint` defaults to the local cache and the Hub. `local` has the fetched folders.
    """
    settings = request.settings
    if settings.model is None:
        raise NibbleError(
            ExitCode.USAGE,
            what="the command has no model",
            expected="MODEL or an argument",
            action=f"name a model, or run `nibble serve {DEFAULT_MODEL}`",
        )
    machine = detect(request.accepted.environ)
    target, choice = choose_target(settings, request, machine)
    folder = local_model(settings.model, request.cache)
    recipe, hardware = _recipe_and_hardware(settings, folder, target, choice, machine)
    revision = settings.revision or (recipe.revision if recipe else "") or None
    if folder is not None:
        checkpoint, note = read_checkpoint(str(folder)), ""
    elif package := PACKAGED.get(settings.model):
        checkpoint, note = None, f"{UNKNOWN_UNTIL_PULL} ({package.origin()})"
    else:
        checkpoint, note = (find_checkpoint or _checkpoint_if_here(request))(
            settings.model, revision
        )
    notes: list[str] = []
    build = "" if hardware.assumed else compiled_id()
    inputs = PlanInputs(
        loaded=request.loaded,
        accepted=request.accepted,
        cli_flags=request.command.flags,
        extra_flags=_checked_extra_flags(request),
        hardware=hardware,
        target=target,
        target_choice=choice,
        checkpoint=checkpoint,
        checkpoint_note=note,
        recipe=recipe,
        local=local,
        is_demo=_is_demo(folder),
        tuned_configs=installed_configs() if target.device == "cuda" else None,
        rules=load_rules(root()),
        build=build,
        trials=_trials(request, target, hardware, build, notes.append),
        trial_notes=tuple(notes),
        vllm=vllm_version(),
        can_compile=None if hardware.assumed else has_flashinfer_compiler(request.accepted.environ),
        without_cpp_compiler=target.device == "cpu" and not has_cpp_compiler(request.environ),
        shm_free_bytes=None if hardware.assumed else shm_free_bytes(),
        chat_template=chat_template(checkpoint.path) if checkpoint and checkpoint.path else "",
        without_plugin="" if hardware.assumed else _missing_plugin(request.environ),
        without_gpu_kernels="" if hardware.assumed else missing_gpu_kernels(request.environ),
    )
    return make_plan(inputs)


def _trials(
    request: Asked, target: Target, hardware: Hardware, build: str, say: Callable[[str], None]
) -> Record | None:
    """The results of kernels on this machine, for a plan of it with GPUs."""
    settings = request.settings
    if not build or target.device != "cuda":
        return None
    if settings.node_rank or settings.nnodes or settings.head_ip or settings.cluster == "ray":
        return None  # each machine's results would give its ranks other kernels
    return open_record(request.cache, place_of(target, hardware, compiled=build), say)


def _missing_plugin(environ: Mapping[str, str]) -> str:
    missing = missing_plugin(environ)
    return missing[0] if missing else ""


def _is_demo(folder: Path | None) -> bool:
    demos = [demo.resolve() for demo in demo_models().values()]
    return folder is not None and folder.resolve() in demos


def _checked_extra_flags(request: Asked) -> dict[str, Any]:
    """The flags in VLLM_EXTRA_ARGS. Checks the flags and variables of every other layer too."""
    settings, schema, from_file = request.settings, load_schema(), file_flags(request.loaded)
    for flag, value in request.accepted.flags.items():
        check_flags({flag: value}, request.accepted.flag_origins[flag], schema)
    check_flags(from_file, str(settings.config), schema)
    check_file_environment(request.loaded.file_env, str(settings.config), schema.envs)
    words = split_words(settings.vllm_extra_args, "VLLM_EXTRA_ARGS")
    extra = read_flags(words, "VLLM_EXTRA_ARGS", schema)
    _check_limits(extra, "VLLM_EXTRA_ARGS")
    _check_limits(from_file, str(settings.config))
    return extra


def _check_limits(flags: Mapping[str, Any], source: str) -> None:
    """Apply the limits of nibble's options to vLLM flags with the same meaning."""
    for field, option in options().items():
        if option.vllm and option.vllm in flags:
            check_option(field, flags[option.vllm], f"{option.vllm} in {source}")


def hub_environ(request: Asked) -> dict[str, str]:
    """The environment for Hub requests, with HF_TOKEN and the download timeout from the
    settings.
    """
    token = request.settings.hf_token
    kept = {
        name: value for name, value in request.accepted.environ.items() if name != "HF_TOKEN_FILE"
    }
    kept[STALL_VARIABLE] = str(request.settings.download_stall_seconds)
    return kept | ({"HF_TOKEN": token.get_secret_value()} if token else {})


def _checkpoint_if_here(request: Asked) -> FindCheckpoint:
    """Finds a checkpoint in the local Hugging Face cache or reads its headers from the Hub;
    otherwise gives the reason why it is unknown.
    """

    def find(model: str, revision: str | None) -> tuple[Checkpoint | None, str]:
        try:
            return read_checkpoint(model, revision, environ=hub_environ(request)), ""
        except NibbleError as error:
            if error.unreachable:
                return None, f"{UNKNOWN_UNTIL_PULL} ({error.what})"
            raise

    return find


def choose_target(settings: Settings, request: Asked, machine: Hardware) -> tuple[Target, Choice]:
    """The target: NIBBLE_TARGET, else that of the image, of the GPU, or the CPU."""
    if settings.target != "auto":
        return load_target(settings.target), Choice(
            settings.target, str(request.loaded.origins["target"]), "set by the user"
        )
    image = request.accepted.environ.get("NIBBLE_IMAGE")
    if not machine.gpus:
        reason = _why_no_gpu(
            machine, request.accepted.environ.get("CUDA_VISIBLE_DEVICES", "").strip()
        )
        if image and image != "cpu":
            what = f"this image is for {image} and {reason}"
            raise NibbleError(
                ExitCode.NO_HARDWARE,
                what=what,
                expected="a GPU in the container",
                action="run with --gpus all and the NVIDIA Container Toolkit",
            )
        return load_target("cpu"), Choice("cpu", "this machine", reason)
    return _target_of_gpus(machine, image)


def _why_no_gpu(machine: Hardware, selection: str) -> str:
    """Raises NO_HARDWARE where `selection`, of CUDA_VISIBLE_DEVICES, names GPUs and none of
    those that are here.
    """
    if machine.nvml_error:
        return f"the GPU driver does not answer: {machine.nvml_error}"
    if not machine.hidden_gpus:
        return "the machine has no GPU"
    what = f"CUDA_VISIBLE_DEVICES={selection} leaves none of {machine.hidden_gpus} GPUs"
    if selection in ("", "-1", "NoDevFiles"):
        return what
    expected = "indices or UUIDs from `nvidia-smi -L`, except those of MIG devices"
    raise NibbleError(
        ExitCode.NO_HARDWARE,
        what=what,
        expected=expected,
        action="correct or unset CUDA_VISIBLE_DEVICES",
    )


def _target_of_gpus(machine: Hardware, image: str | None) -> tuple[Target, Choice]:
    first = machine.gpus[0]
    major, minor = first.capability
    if image == "cpu":
        return load_target("cpu"), Choice(
            "cpu", "image", f"the cpu image does not use the {first.name}"
        )
    if mixed := [gpu for gpu in machine.gpus if gpu.capability != first.capability]:
        what = f"{first.name} and {mixed[0].name} differ in compute capability"
        raise NibbleError(
            ExitCode.NO_HARDWARE,
            what=what,
            expected="GPUs of one kind",
            action="choose equal GPUs with CUDA_VISIBLE_DEVICES",
        )
    target = target_for_capability(first.capability)
    if target is None:
        known = ", ".join(name for name in TARGET_NAMES if name != "cpu")
        what = f"{first.name} has compute capability {major}.{minor}, which nibble does not support"
        raise NibbleError(
            ExitCode.NO_HARDWARE,
            what=what,
            expected=f"one of the targets {known}",
            action="set NIBBLE_TARGET=cpu to serve on the CPU",
        )
    # sm120 and gb10 are built for the same family, 12.0f; any other pair is a wrong image.
    if image and load_target(image).torch_cuda_arch_list != target.torch_cuda_arch_list:
        what = f"this image is for {image}, but the GPU is a {first.name} ({target.name})"
        raise NibbleError(
            ExitCode.NO_HARDWARE,
            what=what,
            expected=f"the {target.name} image",
            action=f"run nibble:{target.name}",
        )
    return target, Choice(
        target.name, "this machine", f"{first.name}, compute capability {major}.{minor}"
    )


def _recipe_and_hardware(
    settings: Settings, folder: Path | None, target: Target, choice: Choice, machine: Hardware
) -> tuple[ResolvedRecipe | None, Hardware]:
    """The recipe for this machine's GPUs, or for the GPUs that a plan for another machine
    assumes.
    """
    recipe_file = None
    package = PACKAGED.get(settings.model or "")
    if settings.recipe == "auto" and settings.model and (folder is None or package):
        recipe_file = load_recipe(package.recipe if package else settings.model, root())
    is_here = target.device == "cpu" or any(
        gpu.capability in target.capabilities for gpu in machine.gpus
    )
    if is_here and target.device == "cuda":
        gpus = machine.gpus[: settings.num_gpus] if settings.num_gpus else machine.gpus
        hardware = replace(machine, gpus=gpus)
        return (
            recipe_file
            and resolve(recipe_file, target.name, len(gpus), [gpu.name for gpu in gpus]),
            hardware,
        )
    if is_here:
        return recipe_file and resolve(recipe_file, target.name, 0), assume(target, 0, machine)
    wanted_gpus = settings.num_gpus or settings.tensor_parallel_size
    recipe = recipe_file and resolve(recipe_file, target.name, wanted_gpus)
    count = wanted_gpus or (recipe.gpus if recipe else None) or 1
    return recipe, assume(target, count, machine)
