"""`nibble doctor --bundle`: an archive with everything a bug report needs and no secret,
wherever one was planted.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from typer.testing import CliRunner

from nibble.cli.app import app
from nibble.cli.doctor import bundle
from nibble.cli.doctor.bundle import open_bundle, write_bundle
from nibble.cli.doctor.report import Check, Report
from nibble.errors import ExitCode, NibbleError
from nibble.machine.targets import TARGET_NAMES, load_target
from nibble.settings.redact import Redactor, is_secret_name, is_shown, shown_variables
from tests.support.processor_time import within

# Where each is planted; none has a form that gives it away unless it says so.
SECRETS = {
    "environment": "Zq7-environment-value",
    "environment, short name": "Zq7-named-key-only",
    "environment, ordinary name": "Zq7-under-a-name-of-another-program",
    "proxy": "Zq7proxypassword",
    "url without a password": "Zq7tokenasuser",
    "webhook": "Zq7/in/the/path/of/a/webhook",
    "file of a variable": "Zq7-from-a-secret-file",
    "api key file": "nbl-Zq7GeneratedKeyOfThisServer00",
    "cluster token file": "Zq7-token-of-the-cluster",
    "stored token": "hf_Zq7StoredTokenOfTheHub",
    "toml": "Zq7-in-the-settings",
    "toml, blanks": "Zq7 a phrase with blanks",
    "command line": "Zq7-on-a-command-line",
    "command line, =": "Zq7-after-an-equals-sign",
    "environment of a server": "Zq7-environment-of-another-process",
    "log, by name": "Zq7-password-in-a-log",
    "log, json": "Zq7-in-a-json-line",
    "log, list": "Zq7-first-of-a-list",
    "log, end of a list": "Zq7-second-of-a-list",
    "log, object": "Zq7-in-an-object",
    "log, call": "Zq7-in-a-call",
    "log, curl": "Zq7ofcurl",
    "log, curl with blanks": "Zq7 of curl",
    "log, curl in a list": "Zq7ofcurlinalist",
    "log, cookie": "Zq7-of-a-session",
    "log, cookies as a dict": "Zq7-of-a-dict",
    "log, signature": "Zq7signatureofalink",
    "log, signature of S3": "Zq7signatureofS3",
    "log, beside a harmless name": "Zq7-in-a-group",
    "log, several keys": "Zq7-key-two",
    "log, quoted flag": "Zq7-in-quotes with blanks",
    "log, bytes": "Zq7-in-bytes",
    "log, json in a text": "Zq7-in-json-in-a-text",
    "log, pair of a header": "Zq7-in-a-pair",
    "log, pair of bytes": "Zq7-in-a-pair-of-bytes",
    "log, header": "Zq7-in-an-authorization-header",
    "log, url": "Zq7-in-a-query",
    "log, form": "hf_Zq7NeverSeenBeforeToken",
    "log, jwt": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJacTcifQ.Zq7signature",
    "log, private key": "MIIEvZq7PrivateKeyBody",
    "fault": "Zq7-in-a-traceback",
    "crash record": "sk-Zq7CauseOfACrash0000",
}


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """A machine with a secret in every place a bundle looks at."""
    cache = tmp_path / "cache"
    for name in ("logs", "crash-loop", "servers"):
        (cache / name).mkdir(parents=True)
    (cache / "api_key").write_text(SECRETS["api key file"] + "\n")
    (cache / "ray_auth_token").write_text(SECRETS["cluster token file"] + "\n")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "token").write_text(SECRETS["stored token"])
    (tmp_path / "secret").write_text(SECRETS["file of a variable"] + "\n")
    named = f'WANDB_KEY = "{SECRETS["toml"]}"\nDB_PASSPHRASE = "{SECRETS["toml, blanks"]}"'
    settings = f"port = 9000\n[env]\n{named}\n[args]\nblock-size = 16\n"
    (tmp_path / "nibble.toml").write_text(settings)
    token = SECRETS["environment"]
    log = [
        "INFO engine: max_num_batched_tokens=8192, prompt tokens: 17, tokenizer=/models/m",
        f"given {token} and {base64.b64encode(token.encode()).decode()} and {quote(token + '/x')}",
        f"the key file holds {SECRETS['api key file']}, the hub {SECRETS['stored token']}",
        f"a file holds {SECRETS['file of a variable']}",
        f"another process said {SECRETS['environment of a server']}",
        f"a node came with {SECRETS['cluster token file']}",
        f"db_password: {SECRETS['log, by name']}, next=1",
        json.dumps({"api_key": SECRETS["log, json"], "model": "acme/demo"}),
        json.dumps(
            {
                "hf_token": [SECRETS["log, list"], SECRETS["log, end of a list"]],
                "kept": "beside a list",
            }
        ),
        json.dumps(
            {"auth": {"user": "me", "word": SECRETS["log, object"]}, "kept": "beside an object"}
        ),
        f"Settings(api_key=SecretStr('{SECRETS['log, call']}'), kept='beside a call')",
        f"tokenizer=(path='/models/m', access_token='{SECRETS['log, beside a harmless name']}')",
        (
            f"curl -u bob:{SECRETS['log, curl']} http://curled.example; curl -u"
            f" 'bob:{SECRETS['log, curl with blanks']}' it"
        ),
        json.dumps(["curl", "-u", f"bob:{SECRETS['log, curl in a list']}", "after the user"]),
        "docker run -u 1000:1000; pip install -U git+https://upgraded.example",
        f"Cookie: a=b; session={SECRETS['log, cookie']}",
        (
            f"{{'cookie': 'a=b; session={SECRETS['log, cookies as a dict']}', 'accept': 'beside a"
            " cookie'}"
        ),
        f"GET https://blob.example/file?sv=2025&sig={SECRETS['log, signature']}&se=2026",
        f"GET https://s3.example/file?X-Amz-Signature={SECRETS['log, signature of S3']}&part=3",
        f"vllm serve m --api-key Zq7-key-one {SECRETS['log, several keys']} --port 8123",
        f"serve --hf-token '{SECRETS['log, quoted flag']}' --port 8124",
        f"connect(password=b'{SECRETS['log, bytes']}', kept='beside bytes')",
        json.dumps(
            {
                "log": json.dumps(
                    {"password": SECRETS["log, json in a text"], "kept": "beside a text"}
                )
            }
        ),
        (
            f"('authorization', 'Basic {SECRETS['log, pair of a header']}'), ('accept', 'beside a"
            " pair')"
        ),
        (
            f"(b'x-api-key', b'{SECRETS['log, pair of bytes']}'), (b'accept', b'beside a pair of"
            " bytes')"
        ),
        f"headers {{'Authorization: Token {SECRETS['log, header']}'}}",
        f"GET /v1/models?access_token={SECRETS['log, url']}&page=2",
        f"leaked {SECRETS['log, form']} and {SECRETS['log, jwt']}",
        (
            f"-----BEGIN RSA PRIVATE KEY-----\n{SECRETS['log, private key']}\n-----END RSA PRIVATE"
            " KEY-----"
        ),
        "the last line of the log",
    ]
    (cache / "logs" / "8000.log").write_text("\n".join(log) + "\n")
    (cache / "last-fault.txt").write_text(
        f"client_secret = '{SECRETS['fault']}'\nValueError: what went wrong\n"
    )
    (cache / "crash-loop" / "1.json").write_text(
        json.dumps({"cause": f"bad key {SECRETS['crash record']}"})
    )
    return {
        "HOME": str(tmp_path),
        "PATH": os.environ["PATH"],
        "NIBBLE_CACHE_DIR": str(cache),
        "HF_HOME": str(tmp_path / "hf"),
        "NIBBLE_CONFIG": str(tmp_path / "nibble.toml"),
        "HF_TOKEN": token,
        "SOME_KEY": SECRETS["environment, short name"],
        "LICENCE": SECRETS["environment, ordinary name"],
        "DB_PASSWORD_FILE": str(tmp_path / "secret"),
        "HTTPS_PROXY": f"http://me:{SECRETS['proxy']}@proxy.example:3128",
        "PIP_INDEX_URL": f"https://{SECRETS['url without a password']}@pypi.example/simple",
        "SLACK_WEBHOOK_URL": f"https://hooks.example/{SECRETS['webhook']}",
        "MAX_MODEL_LEN": "1024",
    }


@pytest.fixture
def server() -> Iterator[subprocess.Popen[bytes]]:
    """A process that passes for vLLM, with secrets in its arguments and its environment."""
    words = [
        "vllm",
        "serve",
        "--api-key",
        SECRETS["command line"],
        f"--hf-token={SECRETS['command line, =']}",
    ]
    hidden = {"NIBBLE_API_KEY": SECRETS["environment of a server"]}
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)", *words], env=hidden
    )
    deadline = time.monotonic() + 10  # until exec has put the arguments there
    while b"--api-key" not in Path(f"/proc/{process.pid}/cmdline").read_bytes():
        assert time.monotonic() < deadline
    yield process
    process.kill()
    process.wait()


def contents(path: Path) -> dict[str, str]:
    found = {}
    with tarfile.open(path) as archive:
        for member in archive.getmembers():
            file = archive.extractfile(member)
            assert file is not None
            found[member.name.removeprefix("nibble-report/")] = file.read().decode()
    return found


REPORT = Report((Check("python", "ok", f"with {SECRETS['environment']}"),))


def test_no_planted_secret_is_in_any_file_of_the_archive(environ, server, tmp_path: Path) -> None:
    write_bundle(open_bundle(tmp_path / "b.tar.gz"), REPORT, environ, "nibble-demo")
    files = contents(tmp_path / "b.tar.gz")
    for name, text in files.items():
        for place, secret in SECRETS.items():
            forms = {
                secret,
                quote(secret, safe=""),
                base64.b64encode(secret.encode()).decode().rstrip("="),
            }
            assert not [form for form in forms if form in text], (
                f"the secret of {place} is in {name}"
            )
        assert "Zq7" not in text, f"part of a secret is in {name}"


def test_the_archive_holds_what_a_report_needs(environ, server, tmp_path: Path) -> None:
    count = write_bundle(open_bundle(tmp_path / "b.tar.gz"), REPORT, environ, "nibble-demo")
    files = contents(tmp_path / "b.tar.gz")
    assert count == len(files)
    assert "plan.txt" not in files, files["plan.txt"]
    wanted = {
        "doctor.json",
        "environment.json",
        "hardware.json",
        "packages.txt",
        "processes.txt",
        "plan.json",
        "settings.toml",
    }
    wanted |= {
        "nibble/logs/8000.log",
        "nibble/last-fault.txt",
        "nibble/crash-loop/1.json",
        "machine/proc-meminfo",
    }
    assert wanted <= set(files)
    log = files["nibble/logs/8000.log"]
    for kept in (
        "max_num_batched_tokens=8192",
        "prompt tokens: 17",
        "tokenizer=/models/m",
        "acme/demo",
        "next=1",
        "page=2",
        "beside a list",
        "beside an object",
        "beside a call",
        "http://curled.example",
        "after the user",
        "-u 1000:1000",
        "https://upgraded.example",
        "beside a cookie",
        "se=2026",
        "part=3",
        "--port 8123",
        "--port 8124",
        "beside bytes",
        "beside a text",
        "'beside a pair'",
        "beside a pair of bytes",
    ):
        assert kept in log
    assert (
        "the last line of the log" in log
        and "ValueError: what went wrong" in files["nibble/last-fault.txt"]
    )
    shown = json.loads(files["environment.json"])
    assert shown["MAX_MODEL_LEN"] == "1024" and shown["HF_TOKEN"] == "[removed]"
    assert "proxy.example:3128" in shown["HTTPS_PROXY"]
    assert shown["PIP_INDEX_URL"] == "https://[removed]@pypi.example/simple"
    assert (
        f"{server.pid} " in files["processes.txt"]
        and "vllm serve --api-key [removed]" in files["processes.txt"]
    )
    assert "block-size = 16" in files["settings.toml"]


def test_state_that_the_settings_file_places_elsewhere_is_found_and_its_keys_are_hidden(
    environ: dict[str, str], tmp_path: Path
) -> None:
    cache = Path(environ.pop("NIBBLE_CACHE_DIR"))
    settings = tmp_path / "nibble.toml"
    settings.write_text(f'cache_dir = "{cache}"\n{settings.read_text()}')
    write_bundle(open_bundle(tmp_path / "b.tar.gz"), REPORT, environ, None)
    log = contents(tmp_path / "b.tar.gz")["nibble/logs/8000.log"]
    assert "a node came with [removed]" in log and "the key file holds [removed]" in log


def test_unreadable_settings_do_not_keep_an_archive_from_being_written(
    environ: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "nibble.toml").write_text("port = ")
    write_bundle(open_bundle(tmp_path / "b.tar.gz"), REPORT, environ, None)
    files = contents(tmp_path / "b.tar.gz")
    assert "is not valid TOML" in files["status.txt"] and "nibble/logs/8000.log" in files


def test_redaction_of_a_long_word_takes_no_time() -> None:
    text = "x" * 300_000 + " token: [" * 2000 + "-" * 20_000 + " " + "cookie" * 20_000
    within(5, lambda: Redactor([]).text(text), tries=2)


def test_the_archive_is_for_its_owner_alone_and_overwrites_nothing(environ, tmp_path: Path) -> None:
    path = tmp_path / "b.tar.gz"
    write_bundle(open_bundle(path), REPORT, environ, None)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(NibbleError) as caught:
        open_bundle(path)
    assert caught.value.code is ExitCode.CONFIG


def test_a_long_log_is_cut_at_a_line_so_that_no_half_secret_is_left(
    environ, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = f"token {SECRETS['environment']} in a line\n"
    log = Path(environ["NIBBLE_CACHE_DIR"]) / "logs" / "8000.log"
    log.write_text(line * 3)
    monkeypatch.setattr(bundle, "LOG_BYTES", len(line) + len(line) - len("token Zq7-env"))
    write_bundle(open_bundle(tmp_path / "b.tar.gz"), REPORT, environ, None)
    assert contents(tmp_path / "b.tar.gz")["nibble/logs/8000.log"] == "token [removed] in a line\n"


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "NIBBLE_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "pgpassword",
        "MAXMIND_LICENSE_KEY",
        "GITHUB_PAT",
    ],
)
def test_secret_names_are_known(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "TOKENIZERS_PARALLELISM",
        "HF_TOKEN_PATH",
        "MAX_MODEL_LEN",
        "RAY_AUTH_MODE",
        "PATH",
        "PWD",
        "FILE_PATTERN",
    ],
)
def test_ordinary_names_are_kept(name: str) -> None:
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("NIBBLE_DRAIN_SECONDS", True),
        ("NIBBLE_API_KEY", False),
        ("NIBBLE_DRAIN_SECOND", False),
        ("VLLM_LOGGING_LEVEL", True),
        ("VLLM_API_KEY", False),
        ("VLLM_OF_TOMORROW", False),
        ("CUDA_VISIBLE_DEVICES", True),
        ("RAY_REDIS_PASSWORD", False),
        ("https_proxy", True),
        ("LICENCE", False),
    ],
)
def test_values_are_shown_of_variables_on_the_list_alone(name: str, shown: bool) -> None:
    assert shown_variables({name: "value", "PATH": "/bin"}) == {
        name: "value" if shown else "[removed]",
        "PATH": "/bin",
    }


def test_every_variable_of_the_targets_is_on_the_list() -> None:
    names = {name for target in TARGET_NAMES for name in load_target(target).env}
    assert names and not [name for name in names if not is_shown(name)]


def test_the_environment_in_a_plan_is_held_to_the_list() -> None:
    env = {"LICENCE": {"value": "1-2-3", "source": "file"}, "OMP_NUM_THREADS": {"value": "4"}}
    kept = Redactor([]).data({"plan": {"env": env}})
    assert kept["plan"]["env"] == {"LICENCE": "[removed]", "OMP_NUM_THREADS": {"value": "4"}}


def test_data_of_another_server_is_redacted_by_the_names_in_it() -> None:
    env = {"WANDB_KEY": {"value": "never seen here", "source": "file"}, "kv_cache_tokens": 4096}
    kept = Redactor([]).data({"plan": {"env": env, "model": "acme/demo"}})
    assert kept == {
        "plan": {"env": {"WANDB_KEY": "[removed]", "kv_cache_tokens": 4096}, "model": "acme/demo"}
    }


def test_a_short_value_does_not_take_words_out_of_everything() -> None:
    assert Redactor(["a", "true"]).text("a true story") == "a true story"


def test_doctor_writes_the_archive_beside_its_report(tmp_path: Path) -> None:
    environ = {
        "HOME": str(tmp_path),
        "NIBBLE_TARGET": "cpu",
        "HF_HUB_OFFLINE": "1",
        "NIBBLE_CACHE_DIR": str(tmp_path),
    }
    words = ["doctor", "--json", "--bundle", str(tmp_path / "b.tar.gz")]
    done = CliRunner().invoke(
        app, words, env={**dict.fromkeys(["NIBBLE_CONFIG", "MODEL"], None), **environ}
    )
    assert json.loads(done.stdout)["exit_code"] == done.exit_code
    assert "read it before you send it" in done.stderr
    assert json.loads(contents(tmp_path / "b.tar.gz")["doctor.json"])["checks"]


def test_a_full_disk_is_one_line(environ: dict[str, str]) -> None:
    with Path("/dev/full").open("wb", buffering=0) as full, pytest.raises(NibbleError) as caught:
        write_bundle(full, REPORT, environ, None)
    assert caught.value.code is ExitCode.NO_FIT and "No space left on device" in caught.value.line()


def test_passwords_are_found_however_a_url_or_proxy_is_written(
    environ: dict[str, str], tmp_path: Path
) -> None:
    proxies = {
        "HTTP_PROXY": "me:Xw8proxypassword@proxy.example:3128",
        "ALL_PROXY": "socks5://me:Xw8/with/slashes@proxy.example:1080",
        "MYPASS": "Xw8-without-an-underscore",
    }
    log = "\n".join(
        [
            "the proxy refused Xw8proxypassword",
            "another refused you:Xw8unknown@proxy.example:3128",
            "https://you:Xw8/unknown@host.example/a",
            "xoxb-Xw8-000000000000 and AIza" + "Xw8" * 11 + "ab",
            (
                "http://hub.example:8000/models/a@main, nibble:cpu@sha256:12ab, bypass=1, one"
                " pass: 3 s"
            ),
        ]
    )
    (Path(environ["NIBBLE_CACHE_DIR"]) / "logs" / "8000.log").write_text(log)
    write_bundle(open_bundle(tmp_path / "b.tar.gz"), REPORT, environ | proxies, None)
    files = contents(tmp_path / "b.tar.gz")
    assert not [name for name, text in files.items() if "Xw8" in text]
    kept = files["nibble/logs/8000.log"].splitlines()[-1]
    assert kept == log.splitlines()[-1]
    assert json.loads(files["environment.json"])["HTTP_PROXY"] == "[removed]@proxy.example:3128"
