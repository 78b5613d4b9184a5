"""Small Hopper decodes to run under compute-sanitizer, each compared with float64 so that what ran is right, too::

    for tool in memcheck synccheck initcheck racecheck; do
        compute-sanitizer --tool $tool python -m tests.gpu.hopper_sanitize
    done

memcheck, synccheck and initcheck find nothing (compute-sanitizer of CUDA 13.0). racecheck reports every hand-over
between the roles: it does not follow the barriers in shared memory (mbarrier) that order them, nor the tensor cores'
own reads. What it would find among the threads of one role it names by lines of one function; there is nothing of it.
"""

from __future__ import annotations

import torch

from tests.gpu.test_hopper_decode import DEVICE, check_call, chosen, make_call, pages_of, rows_of


def main() -> None:
    generator = torch.Generator(DEVICE).manual_seed(1)
    for heads, entries, lens, more_lens in (
        (64, 64, [128, 128, 128], [512, 512, 512]),
        (8, 2, [0, 1, 64, 65, 128], [0, 100, 3, 64, 65]),
        (128, 64, [128, 5], [300, 0]),
        (64, 64, [0, 5, 128, 64], None),
    ):
        view, keys = pages_of(8, 64, generator)
        n, tables, second = len(lens), [keys], None
        window = view, rows_of(n, 128, view.num_slots, generator, 0.1), torch.tensor(lens, device=DEVICE).int()
        if more_lens is not None:
            more, more_keys = pages_of(300, entries, generator)
            rows = rows_of(n, 512, more.num_slots, generator, 0.1)
            second = more, rows, torch.tensor(more_lens, device=DEVICE).int()
            tables.append(more_keys)
        for batch_invariant in (False, True):
            call = make_call(n, heads, window, second, generator, batch_invariant)
            chosen("hopper", heads).decode(call)
            print(f"{heads} heads, {n} tokens: relative error {check_call(call, tables):.2e}")


if __name__ == "__main__":
    main()
