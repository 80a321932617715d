"""What `data.root` may be."""

import shutil
from pathlib import Path

import pytest

from pretrain.options import DataOptions
from ssl_bench.errors import ConfigurationError
from tests.support.faults import fails, pretraining


def test_labels_need_a_folder_of_classes():
    with pytest.raises(ConfigurationError, match=r"data\.labels=true.* needs .* data\.root=DIR"):
        DataOptions(labels=True).open()


@pytest.mark.parametrize("labels", ["true", "false"])
@pytest.mark.parametrize(("kind", "command"), [("tar", "tar -xf"), ("zip", "unzip")])
def test_an_archive_in_place_of_a_folder_is_refused_with_what_unpacks_it(
    place, capsys, kind, command, labels
):
    shutil.make_archive("train", kind, place / "photos")

    said = fails(capsys, pretraining(Path(f"train.{kind}"), "run", f"data.labels={labels}"), 3)

    assert f"expected a folder, got the archive train.{kind}" in said
    assert f"unpack it: {command} train.{kind}" in said
