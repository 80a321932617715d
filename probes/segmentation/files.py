"""What a run of linear segmentation leaves beside its records, by name."""

from dataclasses import dataclass

from ssl_bench.system.naming import image_name


@dataclass(frozen=True)
class FileNames:
    """Of what a run of one protocol on some features leaves."""

    protocol: str
    features: str
    seed: int

    def panel(self, image_id: str) -> str:
        return image_name(image_id, before=f"{self.protocol}-{self.features}-")

    @property
    def training_images(self) -> str:
        return f"{self.protocol}-{self.features}-seed{self.seed}-train.txt"
