"""Which experts of a layer are not whole, by what was written of their parameter: halves,
padding, order of dimensions.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn.parameter import Parameter

pytestmark = pytest.mark.vllm
EXPERTS, ROWS, COLUMNS = 4, 12, 8  # gate and up of 6 rows each


def short(parameter: Any, views: list[Any], is_pair: bool = True) -> list[int]:
    from nibble.engine.plugin.written import _incomplete_experts

    regions = {(int(v.storage_offset()), tuple(v.shape), v.stride()) for v in views}
    return _incomplete_experts(parameter, regions, is_pair)


def weight(*shape: int) -> Any:
    return Parameter(torch.zeros(*shape), requires_grad=False)


def halves(
    parameter: Any, numbers: tuple[int, ...], rows: int = 6, columns: int = COLUMNS
) -> list[Any]:
    """Gate and up of some experts, as vLLM's loader narrows them: each half may be padded at its
    end.
    """
    found = []
    for number in numbers:
        for start in (0, ROWS // 2):
            found.append(parameter.data[number].narrow(0, start, rows).narrow(1, 0, columns))
    return found


@pytest.fixture(autouse=True)
def plugin(kernels: ModuleType) -> ModuleType:
    return kernels


@pytest.mark.parametrize(("rows", "columns"), [(6, COLUMNS), (4, COLUMNS), (6, 4), (1, 1)])
def test_padded_halves_are_whole_and_a_half_alone_is_not(rows: int, columns: int) -> None:
    parameter = weight(EXPERTS, ROWS, COLUMNS)
    views = halves(parameter, (0, 1, 2, 3), rows, columns)
    assert short(parameter, views) == []
    assert short(parameter, views[::2]) == short(parameter, views[1::2]) == [0, 1, 2, 3]
    assert short(parameter, [view for place, view in enumerate(views) if place != 5]) == [2]
    assert short(parameter, halves(parameter, (1,), rows, columns)) == [0, 2, 3]


def test_an_expert_with_a_row_less_than_the_others_is_short() -> None:
    parameter = weight(EXPERTS, ROWS, COLUMNS)
    views = halves(parameter, (0, 1, 3)) + halves(parameter, (2,), rows=5)
    assert short(parameter, views) == [2]


def test_halves_of_columns_where_the_weight_is_transposed() -> None:
    parameter = weight(EXPERTS, COLUMNS, ROWS)
    parameter.is_transposed = True
    views = [parameter.data[n][:, start : start + 6] for n in range(EXPERTS) for start in (0, 6)]
    assert short(parameter, views) == []
    assert short(parameter, views[::2]) == [0, 1, 2, 3]
    assert short(parameter, views[:-1]) == [3]


def test_a_tensor_of_all_experts_is_whole_in_every_view() -> None:
    parameter = weight(EXPERTS, ROWS, COLUMNS)
    for view in (
        parameter.data,
        parameter.data[:, :10, :4],
        parameter.data.view(EXPERTS, -1),
        parameter.data.view(-1),
    ):
        assert short(parameter, [view]) == []
    assert short(parameter, [parameter.data[:, :6]]) == [0, 1, 2, 3]
    assert short(parameter, [parameter.data[:2]]) == [2, 3]


def test_weights_of_one_part_and_biases() -> None:
    down, bias = weight(EXPERTS, COLUMNS, ROWS), weight(EXPERTS, ROWS)
    assert short(down, [down.data[n] for n in (0, 1, 3)], is_pair=False) == [2]
    assert (
        short(bias, [bias.data[n, start : start + 6] for n in range(EXPERTS) for start in (0, 6)])
        == []
    )
    assert short(bias, [bias.data[n, :6] for n in range(EXPERTS)]) == [0, 1, 2, 3]
