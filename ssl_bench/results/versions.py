"""Version numbers of the code that computes results.

A result is outdated if it has a lower version number than the newest code or result.
"""

import re
from functools import cache

import yaml

from ssl_bench.composition.choices import config_folder
from ssl_bench.system.files import PACKAGE_FOLDER

PIPELINE_VERSION = 1
"""Version of image decoding, transforms and feature extraction, which all probes share.

Increase this number after a change of the shared code that changes results. A new number makes all
stored results outdated.
"""

_CLASS_LITERAL = r"^class {name}\b.*?(?:^class |^    metric_version\b[^=\n]*= *(\d+)$|\Z)"


@cache
def metric_version(task: str) -> int:
    """Return `Probe.metric_version` of a task: the version of the code that computes its metrics.

    The version is read from the source code of the probe. Importing the probe would also import
    PyTorch, but `ssl-bench table` must start fast. The result is 1 for tasks of other packages, and
    for probes that do not state a version.
    """
    config = config_folder() / "probe" / f"{task}.yaml"
    if not config.is_file():
        return 1
    address = yaml.load(config.read_text(encoding="utf-8"), yaml.CSafeLoader)["_target_"]
    module, _, name = address.rpartition(".")
    source = PACKAGE_FOLDER.parent.joinpath(*module.split(".")).with_suffix(".py")
    pattern = _CLASS_LITERAL.format(name=name)
    match = re.search(pattern, source.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return int(match[1]) if match and match[1] else 1
