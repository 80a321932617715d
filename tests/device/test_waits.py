"""How often the host waits for the device in each unit of work; no more than is said here."""

import pytest

from tests.device.units import UNITS
from tests.support.simulated_cuda import is_simulated

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not is_simulated(), reason="counts on the simulated device"),
]
# Waits, and uploads from memory that is not pinned.
LIMITS = {
    "training step, softmax": (0, 0),
    "training step, linear": (0, 0),
    "training step, osa_qr": (0, 0),
    "training step, osa_newton_schulz": (0, 0),
    "training step, graying svd": (0, 0),
    "training step, graying dct": (0, 0),
    "training step, SOAP with a refresh": (0, 0),
    # Small ones, of the augmentation, which do not wait.
    "step of a run, dino": (0, 40),
    "step of a run, mae": (0, 1),
    "step of a run, supervised": (0, 1),
    "TokenCut, batch": (1, 0),
    "feature cache, batch": (1, 0),
    "heads' step, upsample4": (0, 0),
    "heads' step, full_resolution": (0, 0),
    "heads' step, histogram": (0, 0),
    "heads' step, majority": (0, 0),
    "heads' step, labels of 100 x 100": (0, 0),
    # Decoded and encoded in every epoch; features that are not finite are known before the step.
    "heads' step, streamed": (1, 0),
    "L-BFGS, iteration": (1, 0),
    "scored segmentation, batch, squash": (1, 0),
    "scored segmentation, batch, patch": (1, 0),
    "scored segmentation, batch, slide": (1, 0),
    "scored retrieval, batch": (1, 0),
    "k-NN and classification, batch": (1, 0),
    "PCA, image": (1, 0),
}


@pytest.mark.parametrize("unit", UNITS)
def test_a_unit_waits_no_more_often_than_is_said(tmp_path, unit):
    counts = UNITS[unit](tmp_path)

    most_waits, most_uploads = LIMITS[unit]
    assert counts.waits <= most_waits, counts.places
    assert counts.uploads <= most_uploads, counts.places
