"""Memory of several models: shares of one machine, and which model is unloaded for which."""

from __future__ import annotations

import pytest

from nibble.errors import ExitCode, NibbleError
from nibble.serve.fleet.budgets import MIB, Need, divide
from nibble.serve.fleet.choose import Loaded, to_unload

GIB = 1 << 30


def need(model: str, base: int, least: int, full: int, stays: bool = False) -> Need:
    return Need(model, base * GIB, least * GIB, full * GIB, stays)


def kv_gib(shares: tuple) -> dict[str, float]:
    return {one.model: one.kv_bytes / GIB for one in shares}


def test_models_that_fit_get_full_caches_and_the_rest_stays_free() -> None:
    shares = divide([need("a", 4, 1, 2), need("b", 8, 1, 3)], 40 * GIB, "together")
    assert kv_gib(shares) == {"a": 2, "b": 3}
    assert all(one.stays for one in shares)
    assert [one.total_bytes // GIB for one in shares] == [6, 11]


def test_what_a_small_cache_does_not_take_goes_to_the_others() -> None:
    shares = divide([need("a", 4, 1, 10), need("b", 4, 1, 2)], 20 * GIB, "together")
    assert kv_gib(shares) == {"a": 10, "b": 2}
    shares = divide([need("a", 4, 1, 50), need("b", 4, 1, 2)], 20 * GIB, "together")
    assert kv_gib(shares) == {"a": 10, "b": 2}
    shares = divide([need("a", 4, 1, 50), need("b", 4, 1, 50)], 20 * GIB, "together")
    assert kv_gib(shares) == {"a": 6, "b": 6}


@pytest.mark.parametrize("loading", ["together", "on-demand"])
@pytest.mark.parametrize("allowed_gib", [11, 13, 14, 19, 30])
def test_no_shares_exceed_the_machine(allowed_gib: int, loading: str) -> None:
    needs = [need("a", 4, 1, 50), need("b", 5, 1, 50)]
    shares = divide(needs, allowed_gib * GIB, loading)  # type: ignore[arg-type]
    assert sum(one.total_bytes for one in shares) <= allowed_gib * GIB
    assert all(one.kv_bytes % MIB == 0 and one.kv_bytes >= GIB for one in shares)


def test_two_that_do_not_fit_together_end_with_7_and_the_sum() -> None:
    with pytest.raises(NibbleError) as caught:
        divide([need("a", 10, 1, 2), need("b", 12, 1, 3)], 20 * GIB, "together")
    assert caught.value.code == ExitCode.NO_FIT
    line = caught.value.line()
    assert "a 11.0 GiB + b 13.0 GiB = 24.0 GiB needed" in line
    assert "20.0 GiB may be used" in line
    assert "NIBBLE_LOADING=on-demand" in line


def test_on_demand_each_may_take_all_that_models_which_stay_leave() -> None:
    needs = [need("a", 10, 1, 20), need("b", 12, 1, 20), need("kept", 2, 1, 9, stays=True)]
    shares = divide(needs, 20 * GIB, "on-demand")
    assert kv_gib(shares) == {"a": 7, "b": 5, "kept": 1}
    assert [one.stays for one in shares] == [False, False, True]


def test_on_demand_the_largest_must_fit_beside_those_that_stay() -> None:
    needs = [need("a", 10, 1, 20), need("b", 16, 1, 20), need("kept", 4, 1, 9, stays=True)]
    with pytest.raises(NibbleError) as caught:
        divide(needs, 20 * GIB, "on-demand")
    assert "kept 5.0 GiB + b 17.0 GiB = 22.0 GiB" in caught.value.line()
    assert "remove `keep`" in caught.value.line()


def test_one_model_that_does_not_fit_alone_is_named_alone() -> None:
    with pytest.raises(NibbleError) as caught:
        divide([need("a", 10, 1, 20), need("b", 30, 1, 20)], 20 * GIB, "on-demand")
    assert "the model does not fit: b 31.0 GiB = 31.0 GiB" in caught.value.line()


def loaded(
    model: str,
    size: int,
    running: int = 0,
    used: float = 0,
    stays: bool = False,
    ready: bool = True,
) -> Loaded:
    return Loaded(model, size, running, used, stays, ready)


@pytest.mark.parametrize(
    ("others", "wanted", "chosen"),
    [
        ([], 10, ()),
        ([loaded("a", 4)], 6, ()),
        ([loaded("a", 6)], 6, ("a",)),
        # the least recently used
        ([loaded("new", 5, used=9), loaded("old", 5, used=1)], 5, ("old",)),
        # an idle one before a busy one, even if it was used later
        ([loaded("busy", 5, running=2, used=1), loaded("idle", 5, used=9)], 5, ("idle",)),
        ([loaded("busy", 5, running=2), loaded("kept", 5, stays=True)], 5, ("busy",)),
        # none whose bytes the others give already
        ([loaded("small", 1, used=1), loaded("large", 8, used=2)], 8, ("large",)),
        ([loaded("a", 5, used=1), loaded("b", 5, used=2)], 10, ("a", "b")),
        # what stays or still loads cannot go
        ([loaded("kept", 5, stays=True)], 6, None),
        ([loaded("loading", 5, ready=False)], 6, None),
    ],
)
def test_the_model_to_unload(
    others: list[Loaded], wanted: int, chosen: tuple[str, ...] | None
) -> None:
    assert to_unload(others, wanted, 10) == chosen
