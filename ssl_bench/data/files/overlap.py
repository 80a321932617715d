"""Whether images that something is fitted to come again among those that are scored."""

import numpy as np

from ssl_bench.data.files.digests import digest_of
from ssl_bench.data.files.readable import files_behind
from ssl_bench.data.samples import ImageSet
from ssl_bench.errors import DataError


def shared_files(fitted: ImageSet, scored: ImageSet, *, allowed: bool) -> int:
    """How many scored images are a file of a fitted one, by a link or a copy of whatever name.

    Of sets whose files are known by size and time alone, files of one size and time are read.
    What lies in no file of its own, and sets of other packages, are not looked at.

    Cost: that of both fingerprints.

    Raises:
        DataError: there are such images, and they are not `allowed`.
    """
    one, other = files_behind(fitted), files_behind(scored)
    if one is None or other is None:
        return 0
    (fitted_set, fitted_places), (scored_set, scored_places) = one, other
    train, val = fitted_set.marks()[fitted_places], scored_set.marks()[scored_places]
    first = None
    count = 0
    for index in np.flatnonzero(np.isin(val, train)):
        path = scored_set.path(int(scored_places[index]))
        same = fitted_set.path(int(fitted_places[np.flatnonzero(train == val[index])[0]]))
        # Of names and times nothing is sure; of contents that were read it is.
        if fitted_set.options.fingerprint == "stat" and digest_of(path) != digest_of(same):
            continue
        first = first or (same, path)
        count += 1
    if first is not None and not allowed:
        raise DataError(
            f"{first[0]}, to which something is fitted, is the same file as {first[1]}, which is "
            f"scored: {count} of {len(scored)} scored images of {scored.name} {scored.split} in "
            "all; take them out of one of the splits, or score them all the same with "
            "data.allow_overlap=true"
        )
    return count
