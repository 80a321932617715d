"""Write tar files in the WebDataset format."""

import io
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path


def write_tar(path: Path, members: Mapping[str, bytes] | Iterable[tuple[str, bytes]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pairs = members.items() if isinstance(members, Mapping) else members
    with tarfile.open(path, "w") as tar:
        for name, content in pairs:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def tars_of(images: Path, folder: Path, *, per_tar: int = 4, labels: bool = True) -> Path:
    """Pack the images of class folders into tar files."""
    paths = sorted(path for path in images.rglob("*") if path.is_file())
    names = [path.relative_to(images).as_posix() for path in paths]
    classes = sorted({name.split("/")[0] for name in names})
    for start in range(0, len(names), per_tar):
        members = {}
        for path, name in list(zip(paths, names, strict=True))[start : start + per_tar]:
            members[name] = path.read_bytes()
            if labels:
                key = name.rpartition(".")[0]
                members[f"{key}.cls"] = str(classes.index(name.split("/")[0])).encode()
        write_tar(folder / f"{start // per_tar:03}.tar", members)
    return folder
