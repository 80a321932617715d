r"""How far is COCO's AP of one order of the images from those of others, and from ours?

    ssl-bench probe --task discovery --checkpoint demo:skip --dataset voc2012 --data-root DATA \
        --limit 200 --out FOLDER probe.longer_side=144
    python -m tests.benchmarks.ap_orders FOLDER > results/tables/ap_orders.md

The probe keeps what each image contributes to `ap`; 200 random orders of these are scored as
COCOeval does.
"""

import sys
from pathlib import Path

import numpy as np

from ssl_bench.results import ResultStore
from ssl_bench.scores import coco_average_precision
from tests.benchmarks.provenance import provenance

ORDERS = 200


def main() -> None:
    store = ResultStore(Path(sys.argv[1]))
    records = {(record.metric, record.layer): record for record in store.records()}
    first = next(iter(records.values()))
    print("# COCO's AP and the order of images\n")
    print(f"{provenance()}; of {first.num_images} images of {first.dataset} {first.split},")
    print(f"{first.model}, recorded at {(first.git_commit or 'unknown')[:10]} on {first.device}\n")
    print("| block | `ap` | `ap_coco`, order of files | of 200 random orders | all equally sure |")
    print("|---:|---:|---:|---:|---:|")
    random = np.random.default_rng(0)
    for layer in sorted(layer for metric, layer in records if metric == "ap"):
        ap, coco = records["ap", layer], records["ap_coco", layer]
        counts = store.per_image(ap)
        assert counts is not None
        orders = [coco_average_precision(random.permutation(counts)) for _ in range(ORDERS)]
        spread = f"{min(orders):.2f} to {max(orders):.2f}, mean {np.mean(orders):.2f}"
        equal = ap.details["if_equally_sure"]
        print(f"| {layer} | {ap.value:.2f} | {coco.value:.2f} | {spread} | {equal:.2f} |")


if __name__ == "__main__":
    main()
