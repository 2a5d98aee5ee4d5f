"""Images in a folder per class; where `data.path` has `train/` and `val/`, `val/` is held out."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset
from torchvision.transforms import v2

from .distributed import UserError
from .sampler import held_out

LAYOUT = """data.path names no folder. One folder of images (jpg, png, ...) per class is expected, such as
  pets/cat/1.jpg  pets/cat/2.jpg  pets/dog/1.jpg
or the same below train/ and val/. Try --data.path pets."""

# Mean and deviation of ImageNet's colours, which pretrained torchvision models expect too.
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass
class DataConfig:
    path: str = ""  # the folder of class folders (or of train/ and val/, if you have split it)
    image_size: int = 64  # pixels along each side of the square that the model sees
    min_crop: float = 0.35  # least part of an image that a random training crop shows; 1: no crops
    flip: bool = True  # mirror training images at random; false where left and right differ
    val_fraction: float = 0.1  # part of the images that is held out for evaluation
    workers: int = 2  # processes that load data, for each rank


class Images(Dataset):
    """Image files, read and transformed when asked for: (image (3, size, size), class)."""

    def __init__(self, files: list[tuple[str, int]], transform: v2.Compose) -> None:
        self.files, self.transform = files, transform

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        file, label = self.files[index]
        try:
            with Image.open(file) as image:
                return self.transform(_rgb(image)), label
        except Exception as error:  # a damaged file can raise nearly anything, depending on format
            raise UserError(f"{file} is not a readable image: {error}")


class Data(NamedTuple):
    train: Images
    val: Images
    sizes: dict[str, int]
    identity: str  # changes when the data does


def build(config: DataConfig, project: Path) -> Data:
    """The training images, augmented at random, and the held-out images, not augmented."""
    if not config.path:
        raise UserError(LAYOUT)
    root = project / Path(config.path).expanduser()
    if config.image_size < 1:
        raise UserError(f"data.image_size is {config.image_size}; it starts at 1")
    if (root / "train").is_dir() and (root / "val").is_dir():
        classes = _classes(root / "train")
        unknown = sorted(set(_classes(root / "val")) - set(classes))
        if unknown:
            raise UserError(f"{root / 'val' / unknown[0]} is a class that train/ does not have")
        train, val = _list(root / "train", classes), _list(root / "val", classes)
    else:
        classes = _classes(root)
        if "train" in classes:
            raise UserError(
                f"{root} has train/ but no val/: add it, or point data.path at {root / 'train'} "
                "to hold out a part of it"
            )
        files = _list(root, classes)
        held = held_out(len(files), config.val_fraction)
        train = [file for file, out in zip(files, held, strict=True) if not out]
        val = [file for file, out in zip(files, held, strict=True) if out]
    if len(classes) < 2:
        raise UserError(f"{root} has one class folder only ('{classes[0]}'); two are the least")
    names = [(Path(file).relative_to(root).as_posix(), label) for file, label in train + val]
    return Data(
        Images(train, _transform(config, augment=True)),
        Images(val, _transform(config, augment=False)),
        {"channels": 3, "image_size": config.image_size, "classes": len(classes)},
        f"images {hashlib.sha256(repr((names, len(val))).encode()).hexdigest()[:16]}",
    )


def _transform(config: DataConfig, augment: bool) -> v2.Compose:
    """From a PIL image of any size to normalised float32 (3, size, size)."""
    size = config.image_size
    steps: list[torch.nn.Module] = [v2.ToImage()]
    if augment and config.min_crop < 1:
        steps.append(v2.RandomResizedCrop(size, scale=(config.min_crop, 1.0)))
    else:
        steps += [v2.Resize(size), v2.CenterCrop(size)]
    if augment and config.flip:
        steps.append(v2.RandomHorizontalFlip())
    steps += [
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(MEAN, DEVIATION),
        v2.ToPureTensor(),
    ]
    return v2.Compose(steps)


def _rgb(image: Image.Image) -> Image.Image:
    """`image` in three 8-bit channels, whether it is grey, has a palette or transparency."""
    if image.mode.startswith("I"):  # 16-bit grey, which convert() would clip to white
        image = Image.fromarray((np.asarray(image) / 257).clip(0, 255).astype(np.uint8))
    return image.convert("RGB")


def _classes(root: Path) -> list[str]:
    """The names of the class folders, sorted: their places are the classes' numbers."""
    if not root.is_dir():
        raise UserError(f"data.path: {root} is not a folder")
    # Not the hidden ones, such as the .ipynb_checkpoints that notebooks leave behind.
    folders = (entry for entry in root.iterdir() if entry.is_dir() and entry.name[0] != ".")
    classes = sorted(folder.name for folder in folders)
    if not classes:
        raise UserError(f"{root} has no class folders; one folder of images per class is expected")
    return classes


def _list(root: Path, classes: list[str]) -> list[tuple[str, int]]:
    """(file, class) of every image below `root`, in an order that is the same on every machine."""
    numbers = {name: number for number, name in enumerate(classes)}
    files = make_dataset(str(root), numbers, extensions=IMG_EXTENSIONS, allow_empty=True)
    empty = set(numbers.values()) - {label for _, label in files}
    for label in sorted(empty):
        if (root / classes[label]).is_dir():
            raise UserError(
                f"{root / classes[label]} holds no images ({', '.join(IMG_EXTENSIONS)}); "
                "add some or remove the folder"
            )
    return files
