"""Decode attention by blocks, warpgroups and clusters, on small batches, for compute-sanitizer."""

from __future__ import annotations

import torch

from tests.support.kernels.attention_cases import assert_close, make_case

LENGTHS = ([1, 17, 0, 300, 2100], [130] * 20)


def main() -> None:
    from nibble_kernels.decode_attention import decode_attention, make_workspace
    from nibble_kernels.decode_attention.reference import attend

    for name, most_clustered in (("blocks", 0), ("warpgroups", 0), ("clusters", 256)):
        for lengths in LENGTHS:
            for fp8 in (False, True):
                case = make_case(lengths, kv_heads=8, fp8=fp8)
                exact = attend(
                    case.query, case.cache, case.pages, case.lengths, case.query_begins,
                    scale=case.scale, dtype=torch.float64,
                )[0]  # fmt: skip
                here = case.on("cuda")
                workspace = make_workspace(
                    len(lengths), 8, 4, 128, least_chunk=32,
                    most_clustered=most_clustered, warpgroups=name != "blocks",
                )  # fmt: skip
                for _ in range(3):  # launches that follow each other
                    found = decode_attention(
                        here.query, here.cache, here.pages, here.lengths, here.query_begins,
                        workspace, scale=case.scale, early=True,
                    )  # fmt: skip
                torch.cuda.synchronize()
                assert_close(found, exact, case)
                print(f"{name}, {'FP8' if fp8 else 'BF16'}, {lengths[:5]}: right", flush=True)


if __name__ == "__main__":
    main()
