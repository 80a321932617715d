"""Random streams of what is trained beside the encoder, whose stream is that of the seed itself."""

import numpy as np

# Keeps them apart from the streams of pretrain/runtime/batches.py.
_PART = 3


def part_seed(seed: int, part: str) -> int:
    """Seed of a head or decoder, so that its weights are not those of the encoder once more.

    Args:
        seed: Of the run.
        part: Its name, such as "head".
    """
    name = int.from_bytes(part.encode())
    (state,) = np.random.SeedSequence((_PART, seed, name)).generate_state(1, np.uint64)
    return int(state)
