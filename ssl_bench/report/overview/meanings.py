"""One sentence a task, for readers who meet its name for the first time."""

from collections.abc import Mapping
from types import MappingProxyType

MEANINGS: Mapping[str, str] = MappingProxyType(
    {
        "segmentation": "A linear head names the class of every pixel from the patches of a block; "
        "mean IoU over the classes, more is better.",
        "tokencut": "The normalised cut of a block's patches gives a box an image; CorLoc: percent "
        "of the images whose box overlaps a true one with an IoU of 1/2, more is better. "
        "Without boxes, only the percent of graphs that say nothing (degenerate).",
        "retrieval": "Patches take the class of their nearest training patches, nothing is "
        "trained; mean IoU over the classes, more is better.",
        "classification": "A linear head names the class of the image; percent right, more is "
        "better.",
        "knn": "Images take the class of their nearest training images, nothing is trained; "
        "percent right, more is better.",
        "correspondence": "A point is looked for in another view or image by the nearest patch; "
        "PCK: percent found within a share of the side of the view, or of the object's box; more "
        "is better.",
        "discovery": "The cuts of a block's patches give several boxes an image; AP, AP50, AR100 "
        "as COCO counts them, of objects of any class, more is better.",
        "clustering": "k-means of the images, or of their patches, beside their classes, which it "
        "does not see; NMI and the like, more is better.",
        "geometry": "How the features of a data set lie in their space: on how many directions "
        "(RankMe, LiDAR, effective rank), how alike views of an image are (alignment), what "
        "patches tell of their place; most of these are neither good nor bad.",
        "pca": "How much of what the patches of an image differ in three components show; neither "
        "more nor less is better: patches that are all alike have one component.",
        "conditioning": "How near tokens, attention and Jacobians of a block are to singular; "
        "condition numbers (less is nearer to an isometry), ranks, CKA.",
    }
)
"""Of the tasks of this suite; others have none."""
