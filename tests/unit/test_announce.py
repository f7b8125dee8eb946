"""What is said when the server is ready, above all about the key."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from nibble.plan.budget import DecodeBound
from nibble.serve.api_key import KeyDecision
from nibble.serve.ready_message import curl, describe_facts, key_lines, reached, ready_lines

URL = "http://127.0.0.1:8000"
NAMES = ("org/model", "default")
FILE = Path("/var/cache/nibble/api_key")
NO_KEY = KeyDecision(None, "loopback", None, "loopback")
GENERATED = KeyDecision("nbl-secret", "generated", FILE, "generated at this start")
STORED = KeyDecision("nbl-secret", "stored", FILE, "generated at an earlier start")
GIVEN = KeyDecision("nbl-secret", "given", None, "the key of NIBBLE_API_KEY")


def test_address_names_numbers_and_a_command_are_told() -> None:
    facts = {"weights_gib": 5.83, "kv_cache_tokens": 730112.0, "kv_cache_gib": 100.25}
    assert ready_lines(URL, NAMES, True, NO_KEY, 23.41, facts, False)[:3] == [
        "ready in 23.4 s: http://127.0.0.1:8000/v1",
        "serving org/model, default: 5.83 GiB of weights, KV cache for 730,112 tokens (100.25 GiB)",
        "status page: http://127.0.0.1:8000/nibble",
    ]


def test_the_decode_speed_that_a_start_reached_stands_beside_its_bound() -> None:
    bound = DecodeBound(10**9, 36e9, 36.0, "2 cores read 36.0 GB/s")
    words = describe_facts({"weights_gib": 0.99} | reached(31.25, bound))
    assert words == "0.99 GiB of weights, 31.2 tokens/s for one sequence (the plan's bound: 36.0)"
    unknown = DecodeBound(10**9, None, None, "unknown")
    assert describe_facts(reached(31.25, unknown)) == "31.2 tokens/s for one sequence"
    assert not reached(None, bound)


def test_a_generated_key_is_shown_on_a_terminal_at_the_start_that_made_it_and_never_else() -> None:
    def shown(key: KeyDecision, on_terminal: bool) -> bool:
        return "nbl-secret" in "\n".join(ready_lines(URL, NAMES, True, key, 1.0, {}, on_terminal))

    assert shown(GENERATED, True)
    assert not shown(GENERATED, False)
    assert not shown(STORED, True)
    assert not shown(GIVEN, True)


def test_the_file_of_a_key_is_named() -> None:
    assert str(FILE) in "\n".join(key_lines(GENERATED, False))
    assert str(FILE) in "\n".join(key_lines(STORED, False))


def test_on_loopback_nothing_is_said_about_keys_and_an_open_server_is_called_open() -> None:
    assert key_lines(NO_KEY, True) == []
    assert key_lines(KeyDecision(None, "anonymous", None, "anyone is admitted"), True) == [
        "clients need no key: anyone is admitted"
    ]


def test_the_command_is_one_that_a_shell_reads_as_meant() -> None:
    words = shlex.split(curl(URL, NAMES, True, NO_KEY))
    assert words[:3] == ["curl", "-s", f"{URL}/v1/chat/completions"]
    assert json.loads(words[-1])["model"] == "default"


def test_the_command_reads_the_key_from_its_file_and_never_holds_it() -> None:
    assert f'"Authorization: Bearer $(cat {FILE})"' in curl(URL, NAMES, True, STORED)
    assert '"Authorization: Bearer $NIBBLE_API_KEY"' in curl(URL, NAMES, True, GIVEN)


def test_a_model_that_does_not_generate_is_not_asked_to_chat() -> None:
    assert curl(URL, NAMES, False, NO_KEY) == f"curl -s {URL}/v1/models"


def test_without_numbers_none_are_invented() -> None:
    assert describe_facts({}) == ""
