"""Videos stored as folders of frames: DAVIS, and your own videos with a mask of the first frame."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal

import numpy as np

from ssl_bench.composition.fields import Bounds, OptionalPath
from ssl_bench.data.files.file_sets import Files, FileSet, LabelMap
from ssl_bench.data.files.fingerprints import FilePart
from ssl_bench.data.files.images import read_image, read_integer_image
from ssl_bench.data.samples import (
    IGNORE_INDEX,
    Frames,
    Layout,
    Sample,
    find_root,
    reject_published_name,
    resolve_dataset_name,
    resolve_folder,
)
from ssl_bench.data.splits import Split, read_list
from ssl_bench.errors import DataError
from ssl_bench.system.files import natural_sort_key

# A video needs at least one frame after the first, in which the objects are tracked.
MaxFrames = Annotated[int, Bounds(2, 10**9)] | None


@dataclass(frozen=True)
class VideoSet(FileSet):
    """A set of videos.

    A sample contains the first frame of a video and its mask. The attribute `frames` of the sample
    contains all frames.

    Attributes:
        ids: Folder of each video, relative to the folder of `images` and of `masks`.
        frame_names: Names of the frames of each video, without suffix, in the order of the video.
        masks: The mask files. The first frame of a video needs a mask. Masks of other frames may be
            missing.
        labels: Object number for each number that a mask stores.
        advice: Command-line arguments to suggest if the mask of a first frame shows no object.
    """

    frame_names: Mapping[str, Sequence[str]] = field(kw_only=True)
    masks: Files = field(kw_only=True)
    labels: LabelMap = field(kw_only=True)
    advice: tuple[str, ...] = ()

    def __getitem__(self, index: int) -> Sample:
        """Decode the first frame of a video. Other frames are decoded when they are accessed.

        Raises:
            DataError: A file is unreadable, the first mask shows no object, a frame differs in size
                from the first frame, or a mask differs in size from its frame.
        """
        video = self.ids[index]
        first = self._read(f"{video}/{self.frame_names[video][0]}")
        path = self.masks.path(first.image_id)
        if first.mask is None or not np.isin(first.mask, (0, IGNORE_INDEX), invert=True).any():
            raise DataError(
                f"the mask {path} shows no object, expected an object number such as 1 in some "
                "pixels",
                hint=self.advice,
            )

        def read(number: int) -> Sample:
            frame = self._read(f"{video}/{self.frame_names[video][number]}")
            if frame.image.shape != first.image.shape:
                raise self._size_error(self.images.path(frame.image_id), frame.image, first.image)
            return frame

        return replace(first, image_id=video, frames=Frames(len(self.frame_names[video]), read))

    def _read(self, frame_id: str) -> Sample:
        image = read_image(self.images.path(frame_id), self.options.bits)
        path = self.masks.path(frame_id)
        if not path.is_file():
            return Sample(frame_id, image)
        mask = self.labels.apply(read_integer_image(path), path)
        if mask.shape != image.shape[:2]:
            raise self._size_error(path, mask, image)
        return Sample(frame_id, image, mask)

    def _size_error(self, path: Path, own: np.ndarray, expected: np.ndarray) -> DataError:
        return DataError(
            f"{path} has {own.shape[1]} x {own.shape[0]} pixels, expected {expected.shape[1]} x "
            f"{expected.shape[0]} as in the frames of its video. Resize it"
        )

    def fingerprint(self) -> str:
        """Return a SHA-256 of the names and contents of all frames and masks.

        The hash also depends on the mapping from the numbers in masks to objects.
        """
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        frames = self.frame_ids
        masked = [frame for frame in frames if self.masks.path(frame).is_file()]
        paths = [*map(self.images.path, frames), *map(self.masks.path, masked)]
        first = [self.ids, len(frames), sorted(self.labels.classes.items())]
        with self.identify_parts(map(FilePart, paths), len(paths)) as found:
            rows = zip(chain(frames, masked), found, strict=True)
            return self.options.compute_fingerprint(chain([first], rows))

    @property
    def frame_ids(self) -> list[str]:
        return [f"{video}/{frame}" for video in self.ids for frame in self.frame_names[video]]

    def validate(self) -> "VideoSet":
        """Check the files of this set, without decoding them, and return the set.

        Raises:
            DataError: There are no videos, a video occurs twice or has fewer than two frames, or
                its first frame has no mask.
        """
        self.require_ids("video")
        for video in self.ids:
            if len(self.frame_names[video]) < 2:
                raise DataError(
                    f"{self.folder / video} has {len(self.frame_names[video])} frames with the "
                    f"suffix {self.images.suffix}, expected at least 2"
                )
        first = [f"{video}/{self.frame_names[video][0]}" for video in self.ids]
        self.require_files(self.masks, first, "first masks")
        return self


@dataclass(frozen=True)
class Davis(Layout):
    """DAVIS 2016 or 2017 in 480p, https://davischallenge.org.

    Masks of DAVIS 2016 store 255 for the object. Masks of DAVIS 2017 store 1, 2, ... for several
    objects, and 255 for ignored pixels.

    Attributes:
        root: The folder that contains JPEGImages, Annotations and ImageSets, or its parent folder.
        year: Year of the masks and of the list of videos.
        val_split: `val`, `train`, or a part of one of them such as `val:0-50%`. If the list of the
            split has another length than the published list of `val`, its length is appended to the
            dataset's name in stored results.
        max_frames: Number of frames to use from the beginning of each video (default: all). If it
            is set, it is appended to the dataset's name in stored results.
    """

    supports = frozenset({"tracking"})

    root: OptionalPath = None
    year: Literal[2016, 2017] = 2017
    val_split: str = "val"
    max_frames: MaxFrames = None

    def __post_init__(self) -> None:
        super().__post_init__()
        Split.parse(self.val_split)

    @property
    def name(self) -> str:
        return f"davis{self.year}"

    def val(self) -> VideoSet:
        """Return the videos of `val_split`.

        Raises:
            DataError: A file is missing.
        """
        root, split = self._root(), Split.parse(self.val_split)
        images = Files(root / "JPEGImages/480p", ".jpg")
        masks = Files(root / "Annotations/480p", ".png")
        source = root / f"ImageSets/{self.year}/{split.name}.txt"
        listed = read_list(source)
        objects = {255: 1} if self.year == 2016 else {n: n for n in (*range(1, 255), IGNORE_INDEX)}
        ids = split.cut(listed)
        videos = VideoSet(
            name=_limited_name(resolve_dataset_name(self.name, {"val": listed}), self.max_frames),
            split=self.val_split,
            source=source,
            ids=ids,
            images=images,
            frame_names=list_frames(ids, images, self.max_frames),
            masks=masks,
            # For 2017 all numbers are allowed, so this hint is only shown for 2016.
            labels=LabelMap({0: 0, **objects}, "Use --dataset davis2017 for several objects"),
            advice=("--dataset", "davis2016") if self.year == 2017 else (),
        ).validate()
        # In some splits, such as test-dev, only the first mask of each video is published. In all
        # other splits, every frame must have a mask.
        frames = videos.frame_ids
        if len(masks.list_missing(frames)) != len(frames) - len(videos):
            videos.require_files(masks, frames, "masks")
        return videos

    def _root(self) -> Path:
        return find_root(
            self.root,
            name=self.name,
            subfolders=("DAVIS",),
            marker_folders=("JPEGImages/480p",),
            tree=f"JPEGImages/480p/VIDEO/*.jpg, Annotations/480p/VIDEO/*.png and "
            f"ImageSets/{self.year}/val.txt",
        )


@dataclass(frozen=True)
class FrameFolders(Layout):
    """Your own videos: a folder of frames for each video, with a mask of the first frame.

    The mask of VIDEO/0001.jpg is VIDEO/0001.png. Masks store 0 for the background, 1, 2, ... for
    the objects, and 255 for ignored pixels. Frames are sorted by the numbers in their names, so 10
    follows 9.

    Attributes:
        root: The folder of the videos, or the folder of one video.
        name: Name of the dataset in stored results and tables.
        image_suffix: End of the file names of frames.
        mask_suffix: End of the file names of masks. Files with this suffix are not frames.
        white_is_object: Whether 255 in a mask marks the only object, as in DAVIS 2016.
        max_frames: Number of frames to use from the beginning of each video (default: all). If it
            is set, it is appended to the dataset's name in stored results.
    """

    supports = frozenset({"tracking"})

    root: OptionalPath = None
    name: str = "frames"
    image_suffix: str = ".jpg"
    mask_suffix: str = ".png"
    white_is_object: bool = False
    max_frames: MaxFrames = None

    def __post_init__(self) -> None:
        super().__post_init__()
        reject_published_name(self.name)

    def val(self) -> VideoSet:
        """Return all videos.

        Raises:
            DataError: There are no videos, or the first frame of a video has no mask.
        """
        if self.root is None:
            raise DataError("no folder of videos was given", hint=("--data-root", "{folder}"))
        root = resolve_folder(self.root)
        if not root.is_dir():
            raise DataError(f"{root} is not a folder, expected a folder of videos")
        images = Files(root, self.image_suffix, excluded_suffix=self.mask_suffix)
        ids = sorted(
            (path.name for path in root.iterdir() if path.is_dir() and path.name[0] != "."),
            key=natural_sort_key,
        )
        if images.ids():
            # The root is the folder of one video.
            root, ids = root.parent, [root.name]
            images = replace(images, folder=root)
        frame_names = list_frames(ids, images, self.max_frames)
        videos = tuple(video for video in ids if frame_names[video])
        if not videos:
            raise DataError(
                f"{root} has no frames, expected VIDEO/*{self.image_suffix}",
                hint=("dataset.image_suffix=.png", "dataset.mask_suffix=_mask.png"),
            )
        numbers = {n: n for n in (*range(1, 255), IGNORE_INDEX)}
        objects = {255: 1} if self.white_is_object else numbers
        return VideoSet(
            name=_limited_name(self.name, self.max_frames),
            split="all",
            source=root,
            ids=videos,
            images=images,
            frame_names=frame_names,
            masks=Files(root, self.mask_suffix),
            labels=LabelMap({0: 0, **objects}, "Remove dataset.white_is_object=true"),
            advice=() if self.white_is_object else ("dataset.white_is_object=true",),
        ).validate()


def list_frames(
    videos: Iterable[str], images: Files, max_frames: int | None
) -> dict[str, tuple[str, ...]]:
    """Return a dictionary with the frame names of each video, without suffix.

    Args:
        videos: Folder name of each video.
        images: The frames. Folders of videos are in `images.folder`.
        max_frames: Number of frames to return from the beginning of each video, or None for all.

    Raises:
        DataError: A folder does not exist.
    """
    frames = {}
    for video in videos:
        folder = images.folder / video
        if not folder.is_dir():
            raise DataError(f"{folder} is not a folder, expected the frames of a video")
        names = replace(images, folder=folder).ids()
        frames[video] = tuple(sorted(names, key=natural_sort_key)[:max_frames])
    return frames


def _limited_name(name: str, max_frames: int | None) -> str:
    return name if max_frames is None else f"{name}-{max_frames}frames"
