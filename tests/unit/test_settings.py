"""One declaration per option: names, limits, layers and where a value came from."""

from __future__ import annotations

from pathlib import Path

import pytest

from nibble.errors import ExitCode, NibbleError
from nibble.settings.declare import token_count
from nibble.settings.options import Settings, options
from nibble.settings.sources import load_settings
from tests.support.refusals import refusal_of


def failure(cli: dict[str, str], environ: dict[str, str]) -> NibbleError:
    return refusal_of(lambda: load_settings(cli, environ))


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "nibble.toml"
    file.write_text("port = 1\nmax_num_seqs = 2\ndrain_seconds = 3\n")
    loaded = load_settings(
        {"port": "30"}, {"NIBBLE_CONFIG": str(file), "PORT": "20", "MAX_NUM_SEQS": "21"}
    )
    assert (loaded.settings.port, loaded.settings.max_num_seqs, loaded.settings.drain_seconds) == (
        30,
        21,
        3,
    )
    assert [
        str(loaded.origins[name]) for name in ("port", "max_num_seqs", "drain_seconds", "host")
    ] == [
        "command line --port",
        "environment MAX_NUM_SEQS",
        f"file {file}",
        "nibble's default",
    ]


def test_every_option_has_an_environment_name_and_help() -> None:
    for name, option in options().items():
        assert option.env, name
        assert option.help.endswith("."), name
        assert all(variable == variable.upper() for variable in option.env)


def test_no_option_invents_a_vllm_name() -> None:
    ours = {variable for option in options().values() for variable in option.env}
    # vLLM's own VLLM_API_KEY is read as an alias; VLLM_EXTRA_ARGS is a name that
    # users of vLLM's images know.
    assert {name for name in ours if name.startswith("VLLM_")} == {
        "VLLM_API_KEY",
        "VLLM_EXTRA_ARGS",
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [("PORT", "abc"), ("PORT", "0"), ("PORT", "65536"), ("MAX_MODEL_LEN", "0"), ("MAX_NUM_SEQS", "1.5"),  # noqa: E501
     ("GPU_MEMORY_UTIL", "0"), ("GPU_MEMORY_UTIL", "1.01"), ("GPU_MEMORY_UTIL", "nan"), ("NIBBLE_DRAIN_SECONDS", "-1"),  # noqa: E501
     ("NIBBLE_ALLOW_ANONYMOUS", "perhaps"), ("CUTE_WO_SPLIT", "3"), ("NIBBLE_TARGET", "sm90")],
)  # fmt: skip
def test_a_value_out_of_range_names_the_variable_and_what_is_expected(
    name: str, value: str
) -> None:
    error = failure({}, {name: value})
    assert error.code == ExitCode.USAGE
    assert error.line().startswith(f"{name} is '{value}'; expected ")


def test_a_wrong_secret_is_never_shown() -> None:
    error = failure({}, {"NIBBLE_API_KEY": "has blank"})
    assert error.code == ExitCode.USAGE and "has blank" not in error.line()


def test_secrets_do_not_appear_in_repr() -> None:
    settings = load_settings(
        {}, {"NIBBLE_API_KEY": "nbl-very-secret", "HF_TOKEN": "hf_secret"}
    ).settings
    assert "very-secret" not in repr(settings) and "hf_secret" not in repr(settings)


def test_an_empty_variable_counts_as_unset() -> None:
    assert load_settings({}, {"PORT": "", "MODEL": " "}).settings.port == 8000


def test_model_and_hf_model_must_agree() -> None:
    assert load_settings({}, {"MODEL": "a/b", "HF_MODEL": "a/b"}).settings.model == "a/b"
    assert failure({}, {"MODEL": "a/b", "HF_MODEL": "a/c"}).code == ExitCode.CONFIG


def test_a_positional_that_differs_from_the_variable_is_refused() -> None:
    assert load_settings({"model": "a/b"}, {"MODEL": "a/b"}).settings.model == "a/b"
    assert failure({"model": "a/b"}, {"MODEL": "a/c"}).code == ExitCode.CONFIG


def test_a_secret_may_come_as_a_file_but_not_twice(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("nbl-from-a-file\n")
    key = load_settings({}, {"NIBBLE_API_KEY_FILE": str(file)}).settings.api_key
    assert key is not None and key.get_secret_value() == "nbl-from-a-file"
    error = failure({}, {"NIBBLE_API_KEY_FILE": str(file), "NIBBLE_API_KEY": "nbl-other-key"})
    assert error.code == ExitCode.CONFIG and "both set" in error.line()


def test_a_secret_in_a_variable_may_end_with_its_files_line_break() -> None:
    """kubectl create secret --from-file hands it on."""
    given = {
        "NIBBLE_API_KEY": "nbl-from-a-pod\n",
        "NIBBLE_CLUSTER_TOKEN": "token-of-all\r\n",
        "HF_TOKEN": "hf_x\n",
    }
    found = load_settings({}, given).settings
    secrets = [found.api_key, found.ray_auth_token, found.hf_token]
    assert [one and one.get_secret_value() for one in secrets] == [
        "nbl-from-a-pod",
        "token-of-all",
        "hf_x",
    ]


@pytest.mark.parametrize("content", [b"", b"\n", b"\xff\xfe\x00", b"x" * 70_000])
def test_an_unusable_secret_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "token").write_bytes(content)
    assert failure({}, {"HF_TOKEN_FILE": str(tmp_path / "token")}).code == ExitCode.CONFIG


def test_a_folder_as_a_secret_file_is_refused(tmp_path: Path) -> None:
    assert failure({}, {"HF_TOKEN_FILE": str(tmp_path)}).code == ExitCode.CONFIG


@pytest.mark.parametrize(
    ("text", "tokens"), [("32768", 32768), ("32K", 32768), ("32k", 32000), ("1M", 1 << 20)]
)
def test_tokens_take_the_suffixes_of_vllm(text: str, tokens: int) -> None:
    assert (
        load_settings({}, {"MAX_MODEL_LEN": text}).settings.max_model_len
        == tokens
        == token_count(text)
    )


@pytest.mark.parametrize(
    ("value", "preset"),
    [
        ("1", "turboquant_k8v4"),
        ("0", None),
        ("4bit_nc", "turboquant_4bit_nc"),
        ("turboquant_3bit_nc", "turboquant_3bit_nc"),
    ],
)
def test_tq_alone_means_k8v4_and_presets_go_by_name(value: str, preset: str | None) -> None:
    assert load_settings({}, {"NIBBLE_TQ": value}).settings.tq == preset


@pytest.mark.parametrize(
    "text",
    ["prot = 8000", "port = [", "api_key = 'nbl-123456789'", "env = 1", "args = ['--seed']"],
    ids=["unknown key", "not TOML", "secret", "no table of variables", "no table of flags"],
)
def test_a_bad_settings_file_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "nibble.toml"
    file.write_text(text)
    assert failure({}, {"NIBBLE_CONFIG": str(file)}).code == ExitCode.CONFIG


def test_a_bad_value_in_a_settings_file_is_named_with_its_key(tmp_path: Path) -> None:
    file = tmp_path / "nibble.toml"
    file.write_text("control_port = 99999\n")
    error = failure({}, {"NIBBLE_CONFIG": str(file)})
    assert error.code == ExitCode.USAGE and error.what == f"control_port in {file} is '99999'"


def test_a_missing_settings_file_is_refused(tmp_path: Path) -> None:
    assert failure({}, {"NIBBLE_CONFIG": str(tmp_path / "none.toml")}).code == ExitCode.CONFIG


def test_a_settings_file_may_hold_flags_and_variables_for_vllm(tmp_path: Path) -> None:
    file = tmp_path / "nibble.toml"
    file.write_text('[args]\nkv-cache-dtype = "fp8"\n[env]\nVLLM_LOGGING_LEVEL = "WARNING"\n')
    loaded = load_settings({}, {"NIBBLE_CONFIG": str(file)})
    assert loaded.file_args == {"kv-cache-dtype": "fp8"} and loaded.file_env == {
        "VLLM_LOGGING_LEVEL": "WARNING"
    }


def test_defaults_are_those_the_documents_name() -> None:
    settings = load_settings({}, {}).settings
    assert (settings.host, settings.port, settings.control_port, settings.drain_seconds) == (
        "127.0.0.1",
        8000,
        8001,
        30,
    )
    assert set(Settings.model_fields) == set(options())
