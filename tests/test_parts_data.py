"""The data sets of generated projects: what they hold, what they refuse, and that models learn them."""

import csv
import dataclasses
import math
import os
import pickle
import re
import shutil
import tomllib
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

import parts

MODEL_FOR = {
    "csv": "mlp",
    "image_folder": "vit",
    "text": "gpt",
    "synthetic_tabular": "mlp",
    "synthetic_image": "vit",
    "synthetic_text": "gpt",
}
SYNTHETIC = [name for name in parts.DATA if name.startswith("synthetic")]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _several_ranks(monkeypatch):
    """As after a launch: among several ranks none prepares a text while the others wait."""
    monkeypatch.setattr(part("text"), "WORLD_SIZE", 2)


def part(data):
    return parts.load(MODEL_FOR[data], data).data


def build(name, project, **config):
    code = part(name)
    return code.build(code.DataConfig(**config), project)


def refused(name, project, **config):
    """The message with which the data set `name` refuses this config."""
    with pytest.raises(parts.load(MODEL_FOR[name], name).UserError) as caught:
        build(name, project, **config)
    return str(caught.value)


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


# ---------------------------------------------------------------- what all data sets share


@pytest.mark.parametrize(
    ("kind", "name"),
    [("model", name) for name in parts.MODELS] + [("data", name) for name in parts.DATA],
)
def test_config_toml_shows_every_field_its_default_and_a_comment(kind, name):
    text = (parts.PARTS / "config" / kind / f"{name}.toml").read_text()
    if kind == "data":
        text = '[data]\npath = ""  ' + text  # as config.toml includes it
    section = tomllib.loads(text)[kind]
    model, data = (name, "synthetic_text") if kind == "model" else (MODEL_FOR[name], name)
    code = parts.load(model, data)
    config = code.model.ModelConfig if kind == "model" else code.data.DataConfig
    assert section == dataclasses.asdict(config())
    assert all("  # " in line for line in text.splitlines()[1:])


@pytest.mark.parametrize("name", parts.DATA)
def test_every_data_set_has_the_common_settings(name):
    config = part(name).DataConfig()
    assert (config.path, config.workers, config.val_fraction) == ("", 2, 0.1)


def test_parts_hold_nothing_that_jinja_would_eat():
    for file in [*parts.PARTS.glob("model/*.py"), *parts.PARTS.glob("data/*.py")]:
        assert not re.search(r"\{[{%#]", file.read_text()), file


# ---------------------------------------------------------------- synthetic


@pytest.mark.parametrize("name", SYNTHETIC)
def test_a_synthetic_sample_depends_on_its_index_alone(name, tmp_path):
    first, again = build(name, tmp_path), build(name, tmp_path)
    other = build(name, tmp_path, seed=1)
    np.random.seed(3)
    torch.manual_seed(3)
    for split in ("train", "val"):
        a, b, c = (getattr(data, split) for data in (first, again, other))
        batch = parts.batch_of(a, [5, 17, 4])
        for x, y in zip(batch, parts.batch_of(b, [5, 17, 4]), strict=True):
            assert torch.equal(x, y)
        assert not torch.equal(batch[0], parts.batch_of(c, [5, 17, 4])[0])
        assert not torch.equal(batch[0][0], batch[0][1])
    assert not torch.equal(first.train[0][0], first.val[0][0])
    assert first.identity == again.identity != other.identity


@pytest.mark.parametrize("name", SYNTHETIC)
def test_synthetic_data_takes_no_memory_however_much_there_is(name, tmp_path):
    data = build(name, tmp_path, samples=10**12)
    assert len(data.train) + len(data.val) == 10**12
    assert len(data.val) == 10**11
    assert len(pickle.dumps(data)) < 5000
    data.train[9 * 10**11 - 1]


@pytest.mark.parametrize("name", SYNTHETIC)
def test_synthetic_data_keeps_a_sample_on_each_side(name, tmp_path):
    for fraction in (0.0, 1.0):
        data = build(name, tmp_path, samples=2, val_fraction=fraction)
        assert (len(data.train), len(data.val)) == (1, 1)
    assert "start at 2" in refused(name, tmp_path, samples=1)
    assert "synthetic" in refused(name, tmp_path, path="my.csv")


def test_synthetic_items_have_the_shapes_and_types_that_models_take(tmp_path):
    row, label = parts.batch_of(build("synthetic_tabular", tmp_path, features=3).train, [0, 1])
    assert (row.shape, row.dtype, label.dtype) == ((2, 3), torch.float32, torch.int64)
    image, label = parts.batch_of(build("synthetic_image", tmp_path, image_size=9).train, [0, 1])
    assert (image.shape, image.dtype, label.dtype) == ((2, 3, 9, 9), torch.float32, torch.int64)
    tokens, targets = parts.batch_of(build("synthetic_text", tmp_path, context=7).train, [0, 1])
    assert (tokens.shape, tokens.dtype, targets.dtype) == ((2, 7), torch.int64, torch.int64)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])


# ---------------------------------------------------------------- csv


def table(path, rows, header="a,b,target"):
    return write(path, header + "\n" + "".join(",".join(map(str, row)) + "\n" for row in rows))


def test_csv_features_are_standardised_by_the_training_rows_alone(tmp_path):
    rng = np.random.default_rng(0)
    values = rng.normal(5, 3, size=(200, 2))
    table(tmp_path / "t.csv", [(*row, "yes" if row[0] > 5 else "no") for row in values])
    data = build("csv", tmp_path, path="t.csv")
    assert data.sizes == {"features": 2, "outputs": 2}
    assert len(data.train) + len(data.val) == 200
    features, classes = parts.batch_of(data.train, list(range(len(data.train))))
    assert features.dtype == torch.float32
    assert classes.dtype == torch.int64
    torch.testing.assert_close(features.mean(0), torch.zeros(2), rtol=0, atol=1e-5)
    torch.testing.assert_close(features.std(0, correction=0), torch.ones(2))
    held = part("csv").held_out(200, 0.1)
    mean, std = values[~held].mean(0), values[~held].std(0)
    torch.testing.assert_close(
        parts.batch_of(data.val, list(range(held.sum())))[0].numpy(),
        ((values[held] - mean) / std).astype(np.float32),
    )
    assert classes.tolist() == [int(v > 5) for v in values[~held][:, 0]]  # "no" is 0, "yes" is 1


def test_csv_regression_predicts_a_standardised_number(tmp_path):
    table(tmp_path / "t.csv", [(i, -i, 100 * i + 7) for i in range(50)])
    data = build("csv", tmp_path, path=str(tmp_path / "t.csv"), task="regression")
    assert data.sizes == {"features": 2, "outputs": 1}
    features, targets = parts.batch_of(data.train, list(range(len(data.train))))
    assert targets.dtype == torch.float32
    torch.testing.assert_close(targets, features[:, 0], rtol=1e-4, atol=1e-5)


def test_csv_folders_train_and_val_win_over_the_hash(tmp_path):
    for split, rows in (("train", 10), ("val", 4)):
        for file in ("1.csv", "2.csv"):
            table(tmp_path / "d" / split / file, [(i, 2 * i, "xy"[i % 2]) for i in range(rows)])
    data = build("csv", tmp_path, path="d")
    assert (len(data.train), len(data.val)) == (20, 8)
    table(tmp_path / "d" / "val" / "2.csv", [(1, 2, "x")], header="b,a,target")
    assert "2.csv: its columns (b, a, target) are not those" in refused("csv", tmp_path, path="d")


def test_csv_reads_what_spreadsheets_write(tmp_path):
    rows = '\ufeffa , "long, name",target\r\n1,2,"x ""y"""\r\n\r\n 3 ,4e1,z\r\n'
    write(tmp_path / "t.csv", rows)
    data = build("csv", tmp_path, path="t.csv")
    assert len(data.train) + len(data.val) == 2


def test_csv_columns_that_are_constant_become_zero(tmp_path):
    table(tmp_path / "t.csv", [(0.1, i, i % 2) for i in range(20)])
    features, _ = parts.batch_of(build("csv", tmp_path, path="t.csv").train, [0, 1, 2])
    assert features[:, 0].abs().max() < 1e-6


def test_csv_identity_follows_the_content_not_the_place(tmp_path):
    rows = [(i, i % 7, i % 2) for i in range(20)]
    table(tmp_path / "t.csv", rows)
    table(tmp_path / "elsewhere" / "u.csv", rows)
    first = build("csv", tmp_path, path="t.csv").identity
    assert build("csv", tmp_path, path="elsewhere/u.csv").identity == first
    assert build("csv", tmp_path, path="t.csv", val_fraction=0.5).identity != first
    table(tmp_path / "t.csv", [*rows[:-1], (19, 5, 0)])
    assert build("csv", tmp_path, path="t.csv").identity != first


HEADER = "a,b,target\n"
CSV_ERRORS = [
    # content, config, what the message says
    ("", {}, "t.csv is empty"),
    (HEADER, {}, "t.csv has a header but no rows"),
    (HEADER + "1,2,x\n", {}, "holds a single row"),
    (
        HEADER + "1,2,x\n3,4,y\n",
        {"target": "label"},
        "no column 'label'; set data.target to one of: a, b, target",
    ),
    (HEADER + "1,2,x\n3,old,y\n", {}, "t.csv line 3, column 'b': 'old' is no number"),
    (HEADER + "1,2,x\n\n3,,y\n", {}, "t.csv line 4, column 'b': the cell is empty"),
    (HEADER + "1,2,x\n3,4,\n", {}, "t.csv line 3, column 'target': the cell is empty"),
    (HEADER + "1,2,x\nNaN,4,y\n", {}, "t.csv line 3, column 'a': NaN is not finite"),
    (HEADER + "1,2,x\n3,inf,y\n", {}, "t.csv line 3, column 'b': inf is not finite"),
    (
        HEADER + "1,2,5\n3,4,x\n",
        {"task": "regression"},
        "t.csv line 3, column 'target': 'x' is no number",
    ),
    (HEADER + "1,2,x\n3,4,y,5\n", {}, "t.csv line 3: 4 cells, but the header has 3"),
    (HEADER + "1,2,x\n3,4,x\n", {}, "column 'target' has one value only"),
    ("a,a,target\n1,2,x\n", {}, "line 1: a column name stands there twice"),
    ("target\nx\ny\n", {}, "no column beside the target"),
    (b"a,b,target\n1,2,\xe9\n", {}, "t.csv is not UTF-8"),
    (HEADER + '1,2,"' + 200_000 * "x" + '"\n', {}, "t.csv cannot be read as CSV"),
    (HEADER + "".join(f"1,{i},{i}.5\n" for i in range(50)), {}, 'data.task = "regression"'),
]


@pytest.mark.parametrize(("content", "config", "says"), CSV_ERRORS, ids=lambda v: str(v)[-30:])
def test_csv_mistakes_are_named_by_file_line_and_column(content, config, says, tmp_path):
    write(tmp_path / "t.csv", content)
    message = refused("csv", tmp_path, path="t.csv", **config)
    assert says in message
    assert message.startswith(str(tmp_path / "t.csv"))
    assert "\n" not in message


def test_csv_without_data_shows_the_layout(tmp_path):
    message = refused("csv", tmp_path)
    assert "5.1,3.5,setosa" in message
    assert "--data.path" in message
    assert "does not exist" in refused("csv", tmp_path, path="no.csv")
    (tmp_path / "empty").mkdir()
    assert "empty holds no *.csv file" in refused("csv", tmp_path, path="empty")


# ---------------------------------------------------------------- images


def image(path, size=(12, 10), mode="RGB", value=128):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value if mode in ("L", "I;16", "P") else (value,) * len(mode)).save(path)
    return path


def pets(root, n=12):
    for number in range(n):
        image(root / "cat" / f"{number:02}.png", value=50 + number)
        image(root / "dog" / f"deep/{number:02}.jpg", value=200 - number)


def test_images_come_in_classes_and_each_on_one_side(tmp_path):
    pets(tmp_path / "pets")
    data = build("image_folder", tmp_path, path="pets", image_size=8)
    assert data.sizes == {"channels": 3, "image_size": 8, "classes": 2}
    files = sorted(data.train.files + data.val.files)
    assert len(files) == 24
    assert [label for _, label in files] == [0] * 12 + [1] * 12
    picture, label = parts.batch_of(data.train, [0, 1])
    assert (picture.shape, picture.dtype) == ((2, 3, 8, 8), torch.float32)
    assert type(picture[0]) is torch.Tensor
    assert label.dtype == torch.int64


def test_only_training_images_are_augmented_and_by_the_global_seed(tmp_path):
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for name in "ab":
            (tmp_path / split / name).mkdir(parents=True)
            noise = rng.integers(0, 255, (20, 30, 3), dtype=np.uint8)
            Image.fromarray(noise).save(tmp_path / split / name / "1.png")
    data = build("image_folder", tmp_path, path=".", image_size=8)

    def look(dataset, seed):
        torch.manual_seed(seed)
        return dataset[0][0]

    assert torch.equal(look(data.val, 0), look(data.val, 1))
    assert torch.equal(look(data.train, 0), look(data.train, 0))
    assert not torch.equal(look(data.train, 0), look(data.train, 1))
    plain = build("image_folder", tmp_path, path=".", image_size=8, min_crop=1, flip=False)
    assert torch.equal(look(plain.train, 0), look(plain.train, 1))


@pytest.mark.parametrize(
    ("mode", "suffix"),
    [("RGB", "jpg"), ("L", "png"), ("RGBA", "png"), ("P", "png"), ("CMYK", "jpg"), ("I;16", "png")],
)
def test_images_of_any_kind_become_three_channels(mode, suffix, tmp_path):
    value = 128 * 257 if mode == "I;16" else 128
    image(tmp_path / "a" / f"1.{suffix}", mode=mode, value=value)
    image(tmp_path / "b" / "1.png")
    data = build("image_folder", tmp_path, path=".", image_size=8)
    files = data.train.files + data.val.files
    picture, _ = type(data.val)(sorted(files), data.val.transform)[0]
    assert picture.shape == (3, 8, 8)
    if mode in ("L", "I;16"):
        mean, deviation = torch.tensor(part("image_folder").MEAN), part("image_folder").DEVIATION
        grey = picture.mean((1, 2)) * torch.tensor(deviation) + mean
        torch.testing.assert_close(grey, torch.full((3,), 128 / 255), rtol=0, atol=0.01)


def test_image_train_and_val_folders_share_the_classes(tmp_path):
    pets(tmp_path / "train", 5)
    image(tmp_path / "val" / "dog" / "1.png")
    data = build("image_folder", tmp_path, path=".")
    assert (len(data.train), len(data.val)) == (10, 1)
    assert data.val[0][1] == 1
    image(tmp_path / "val" / "bird" / "1.png")
    assert "val/bird is a class that train/ does not have" in refused(
        "image_folder", tmp_path, path="."
    )


def test_image_mistakes_are_named(tmp_path):
    assert "pets/cat/1.jpg" in refused("image_folder", tmp_path)
    assert "nowhere is not a folder" in refused("image_folder", tmp_path, path="nowhere")
    image(tmp_path / "flat" / "1.png")
    assert "flat has no class folders" in refused("image_folder", tmp_path, path="flat")
    pets(tmp_path / "pets", 3)
    (tmp_path / "pets" / ".ipynb_checkpoints").mkdir()
    build("image_folder", tmp_path, path="pets")
    write(tmp_path / "pets" / "ant" / "notes.txt", "no image")
    assert "pets/ant holds no images (.jpg" in refused("image_folder", tmp_path, path="pets")
    image(tmp_path / "one" / "cat" / "1.png")
    image(tmp_path / "one" / "cat" / "2.png")
    assert "one class folder only ('cat')" in refused("image_folder", tmp_path, path="one")
    pets(tmp_path / "half" / "train", 3)
    image(tmp_path / "half" / "test" / "cat" / "1.png")
    assert "has train/ but no val/" in refused("image_folder", tmp_path, path="half")
    assert "image_size is 0" in refused("image_folder", tmp_path, path="pets", image_size=0)


@pytest.mark.parametrize("broken", [b"", b"not an image", "cut"])
def test_a_broken_image_is_named_when_it_is_loaded(broken, tmp_path):
    pets(tmp_path, 4)
    for file in tmp_path.rglob("*.jpg"):
        file.write_bytes(file.read_bytes()[:150] if broken == "cut" else broken)
    data = build("image_folder", tmp_path, path=".")
    with pytest.raises(parts.load("vit", "image_folder").UserError) as caught:
        [data.train[index] for index in range(len(data.train))]
    assert re.search(r"dog/deep/0\d\.jpg is not a readable image: ", str(caught.value))


def test_image_identity_follows_the_names(tmp_path):
    pets(tmp_path / "pets", 4)
    first = build("image_folder", tmp_path, path="pets").identity
    shutil.move(tmp_path / "pets", tmp_path / "moved")
    assert build("image_folder", tmp_path, path="moved").identity == first
    image(tmp_path / "moved" / "cat" / "new.png")
    assert build("image_folder", tmp_path, path="moved").identity != first


# ---------------------------------------------------------------- text


def prepare(project, **config):
    code = part("text")
    code.prepare(code.DataConfig(**config), project)
    return build("text", project, **config)


def targets_of(dataset):
    """The targets of all windows, and a check that the inputs are those shifted by one."""
    tokens = np.fromfile(dataset.file, dtype=np.uint16)
    inputs, targets = parts.batch_of(dataset, list(range(len(dataset))))
    real = targets.flatten() != -100
    assert inputs.flatten()[real].tolist() == tokens[:-1].tolist()
    assert (inputs.flatten()[~real] == 256).all()
    assert real[: int(real.sum())].all()  # only the last window is filled up
    return targets.flatten()[real].tolist()


@pytest.mark.parametrize(
    "lengths", [[1], [5], [16, 0, 3], [100, 7], [8191], [8192 * 3], [131_072, 200_000, 1]]
)
def test_every_token_is_a_target_exactly_once(lengths, tmp_path):
    rng = np.random.default_rng(sum(lengths))
    stream = []
    for number, length in enumerate(lengths):
        text = bytes(rng.integers(97, 123, length).astype(np.uint8))
        write(tmp_path / "corpus" / f"{number}" / "a.txt", text)
        if length:
            stream += [*text, 256]
    data = prepare(tmp_path, path="corpus", context=16)
    train, val = targets_of(data.train), targets_of(data.val)
    assert len(train) + len(val) == len(stream)
    assert train
    assert val
    chunk = min(8192, max(1, len(stream) // 256))
    held = part("text").held_out(-(-len(stream) // chunk), 0.1)
    both = {False: iter(train), True: iter(val)}
    assert [next(both[bool(held[i // chunk])]) for i in range(len(stream))] == stream


def test_windows_hold_the_context_and_the_sizes_say_so(tmp_path):
    write(tmp_path / "a.txt", "grüße, 世界. " * 500)
    data = prepare(tmp_path, path="a.txt", context=32)
    assert data.sizes == {"vocab_size": 257, "context": 32}
    tokens, targets = data.train[0]
    assert (tokens.shape, targets.shape) == ((32,), (32,))
    assert tokens.dtype == targets.dtype == torch.int64
    assert tokens[0] == 256  # the end of nothing: so that the first byte is predicted, too
    assert bytes(tokens[1:].tolist()).decode(errors="ignore").startswith("grüße, 世界")
    count = parts.load("gpt", "text").model.count
    last = parts.batch_of(data.train, [len(data.train) - 1])
    assert 0 < count(last) <= 32


def test_text_train_and_val_folders_win_over_the_hash(tmp_path):
    write(tmp_path / "t" / "train" / "a.txt", "train " * 40)
    write(tmp_path / "t" / "val" / "b.txt", "val " * 10)
    data = prepare(tmp_path, path="t", context=8)
    assert targets_of(data.train) == [*(b"train " * 40), 256]
    assert targets_of(data.val) == [*(b"val " * 10), 256]


def test_text_of_any_size_streams_through_bounded_memory(tmp_path):
    size = 48 << 20
    with (tmp_path / "big.txt").open("wb") as file:
        for _ in range(size >> 20):
            file.write(b"0123456789abcde\n" * (1 << 16))
    tracemalloc.start()
    try:
        data = prepare(tmp_path, path="big.txt")
        assert tracemalloc.get_traced_memory()[1] < 12 << 20
        assert len(pickle.dumps(data.train)) < 1000
    finally:
        tracemalloc.stop()
    tokens = sum(len(split.tokens) - 1 for split in (data.train, data.val))
    assert tokens == size + 1
    assert len(data.val.tokens) / tokens == pytest.approx(0.1, abs=0.02)


def test_a_character_that_straddles_two_blocks_is_one(tmp_path, monkeypatch):
    monkeypatch.setattr(part("text"), "BLOCK", 5)
    write(tmp_path / "a.txt", "äöü世界" * 20)
    prepare(tmp_path, path="a.txt")


def test_prepare_is_done_once_and_again_when_the_text_changes(tmp_path, capsys):
    file = write(tmp_path / "a.txt", "some text " * 100)
    first = prepare(tmp_path, path="a.txt")
    assert "prepared the text" in capsys.readouterr().out
    before = first.train.file.stat()
    again = prepare(tmp_path, path="a.txt")
    assert capsys.readouterr().out == ""
    assert again.train.file.stat() == before
    assert again.identity == first.identity
    os.utime(file, ns=(1, 1))
    assert "run `python prepare.py` first" in refused("text", tmp_path, path="a.txt")
    touched = prepare(tmp_path, path="a.txt")
    assert touched.train.file != first.train.file
    assert touched.identity == first.identity  # the same tokens: a run may go on
    write(file, "other text " * 100)
    assert prepare(tmp_path, path="a.txt").identity != first.identity
    assert prepare(tmp_path, path="a.txt", val_fraction=0.3).identity != first.identity


@pytest.mark.parametrize("damage", ["no meta", "bad meta", "odd meta", "no val", "short train"])
def test_a_damaged_preparation_is_noticed_and_done_again(damage, tmp_path):
    write(tmp_path / "a.txt", "some text " * 100)
    folder = prepare(tmp_path, path="a.txt").train.file.parent
    whole = {file.name: file.read_bytes() for file in folder.iterdir()}
    match damage:
        case "no meta":
            (folder / "meta.json").unlink()
        case "bad meta":
            (folder / "meta.json").write_text('{"bytes": ')
        case "odd meta":
            (folder / "meta.json").write_text("[]")
        case "no val":
            (folder / "val.bin").unlink()
        case "short train":
            (folder / "train.bin").write_bytes(whole["train.bin"][:-2])
    assert "run `python prepare.py` first" in refused("text", tmp_path, path="a.txt")
    prepare(tmp_path, path="a.txt")
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == whole


def test_a_prepare_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    write(tmp_path / "a.txt", "some text " * 100)
    code = part("text")
    tokens = code._tokens

    def full(files):
        yield from tokens(files)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(code, "_tokens", full)
    with pytest.raises(OSError, match="No space left"):
        prepare(tmp_path, path="a.txt")
    assert list((tmp_path / "data" / "prepared").iterdir()) == []


def test_two_nodes_may_prepare_the_same_text_at_once(tmp_path, monkeypatch):
    write(tmp_path / "a.txt", "some text " * 100)
    code = part("text")
    write_tokens = code._write

    def slow(documents, val_fraction, folder):
        write_tokens(documents, val_fraction, folder)
        monkeypatch.setattr(code, "_write", write_tokens)
        prepare(tmp_path, path="a.txt")  # the other node, meanwhile

    monkeypatch.setattr(code, "_write", slow)
    assert len(prepare(tmp_path, path="a.txt").train)
    assert len(list((tmp_path / "data" / "prepared").iterdir())) == 1


def test_text_mistakes_are_named(tmp_path):
    error = parts.load("gpt", "text").UserError
    write(tmp_path / "bad" / "sub" / "x.txt", b"fine " * 300_000 + b"\xff oh")
    with pytest.raises(error, match=r"sub/x\.txt is not UTF-8 text: .* at byte 1500000$"):
        prepare(tmp_path, path="bad")
    write(tmp_path / "cut.txt", "fine ä".encode()[:-1])
    with pytest.raises(error, match="is not UTF-8 text: unexpected end of data at byte 5"):
        prepare(tmp_path, path="cut.txt")
    with pytest.raises(error, match="nowhere does not exist"):
        prepare(tmp_path, path="nowhere")
    write(tmp_path / "none" / "a.md", "text")
    with pytest.raises(error, match=r"none holds no \*.txt file"):
        prepare(tmp_path, path="none")
    write(tmp_path / "empty" / "a.txt", "")
    with pytest.raises(error, match="empty is empty"):
        prepare(tmp_path, path="empty")
    with pytest.raises(error, match=r"a\.txt is empty"):
        prepare(tmp_path, path="empty/a.txt")
    assert "run `python prepare.py` first" in refused("text", tmp_path)
    assert "data.context is 0" in refused("text", tmp_path, context=0)


def test_a_rank_alone_prepares_by_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(part("text"), "WORLD_SIZE", 1)
    write(tmp_path / "a.txt", "some text " * 100)
    assert len(build("text", tmp_path, path="a.txt").val) > 0


def test_hidden_files_are_no_text(tmp_path):
    write(tmp_path / "t" / "a.txt", "text")
    write(tmp_path / "t" / "._a.txt", b"\xff\xfe")
    write(tmp_path / "t" / ".ipynb_checkpoints" / "a.txt", "text")
    data = prepare(tmp_path, path="t")
    assert len(targets_of(data.train)) + len(targets_of(data.val)) == 5


def test_text_without_a_path_is_the_documentation_that_python_ships(tmp_path, capsys):
    data = prepare(tmp_path)
    assert "documentation that Python itself ships" in capsys.readouterr().out
    assert len(data.train.tokens) + len(data.val.tokens) > 400_000
    again = prepare(tmp_path)
    assert again.identity == data.identity
    assert again.train.file == data.train.file


# ---------------------------------------------------------------- in a loader, and learnt


def examples(project):
    """A small data set of each kind, as a config for each part."""
    table(project / "t.csv", [(i, i % 7, "xy"[i % 2]) for i in range(40)])
    pets(project / "pets", 8)
    write(project / "a.txt", "some text " * 100)
    prepare(project, path="a.txt")
    paths = {"csv": "t.csv", "image_folder": "pets", "text": "a.txt"}
    return [(name, {"path": paths[name]} if name in paths else {}) for name in parts.DATA]


def test_all_data_sets_pickle_for_workers_of_any_start_method(tmp_path):
    for name, config in examples(tmp_path):
        data = build(name, tmp_path, **config)
        torch.manual_seed(0)
        expected = parts.batch_of(data.val, [0])
        copy = pickle.loads(pickle.dumps(data.val))
        assert len(copy) == len(data.val)
        for a, b in zip(expected, parts.batch_of(copy, [0]), strict=True):
            assert torch.equal(a, b), name
    loaded = next(iter(DataLoader(data.train, batch_size=3, num_workers=1)))
    assert len(loaded[0]) == 3


def test_a_table_of_breast_cancers_is_learnt(tmp_path):
    from sklearn.datasets import load_breast_cancer

    cancer = load_breast_cancer()
    with (tmp_path / "cancer.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*cancer.feature_names, "diagnosis"])
        writer.writerows(
            [*row, cancer.target_names[kind]]
            for row, kind in zip(cancer.data, cancer.target, strict=True)
        )
    code, _, _ = parts.load("mlp", "csv")
    data = build("csv", tmp_path, path="cancer.csv", target="diagnosis")
    model = parts.new_model(code, data.sizes)
    losses = parts.train(code, model, data.train, 40, 64, 3e-3)
    assert losses[-1] < losses[0] / 3
    score = parts.evaluate(code, model, data.val)
    print("breast cancer accuracy", score["correct"])
    assert score["correct"] > 0.9  # always guessing "benign": 0.63


def test_a_number_is_learnt_from_a_table(tmp_path):
    from sklearn.datasets import load_diabetes

    diabetes = load_diabetes()
    rows = [(*row, y) for row, y in zip(diabetes.data, diabetes.target, strict=True)]
    table(tmp_path / "t.csv", rows, header=",".join([*diabetes.feature_names, "target"]))
    code, _, _ = parts.load("mlp", "csv")
    data = build("csv", tmp_path, path="t.csv", task="regression")
    model = parts.new_model(code, data.sizes, dropout=0.3)
    parts.train(code, model, data.train, 60, 64, 1e-3)
    score = parts.evaluate(code, model, data.val)
    print("diabetes, part of the variance left", score["loss"])
    assert score["loss"] < 0.75  # always guessing the mean: about 1


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    from sklearn.datasets import load_digits

    root = tmp_path_factory.mktemp("digits")
    data = load_digits()
    for number, (pixels, kind) in enumerate(zip(data.images, data.target, strict=True)):
        (root / str(kind)).mkdir(exist_ok=True)
        Image.fromarray((pixels * 15.9).astype(np.uint8)).save(root / str(kind) / f"{number}.png")
    return root


@pytest.mark.parametrize(
    ("model", "config", "steps", "size", "lr", "reached"),
    [
        ("resnet", {}, 35, 32, 1e-3, 0.4),
        ("vit", {"layers": 2}, 80, 32, 1e-3, 0.8),
    ],
)
def test_digits_are_learnt(model, config, steps, size, lr, reached, digits):
    code, data_code, _ = parts.load(model, "image_folder")
    data = data_code.build(
        data_code.DataConfig(path=str(digits), image_size=8, min_crop=1.0, flip=False), Path()
    )
    net = parts.new_model(code, data.sizes, **config)
    torch.manual_seed(0)
    losses = parts.train(code, net, data.train, steps, size, lr)
    assert losses[-1] < 0.6 * losses[0]
    score = parts.evaluate(code, net, data.val)
    print(model, "digits accuracy", score["correct"])
    assert score["correct"] > reached  # guessing: 0.1


def test_the_python_documentation_is_learnt(tmp_path):
    code = parts.load("gpt", "text").model
    data = prepare(tmp_path, context=64)
    net = parts.new_model(code, data.sizes, layers=2)
    losses = parts.train(code, net, data.train, 80, 16, 3e-3)
    assert losses[0] == pytest.approx(math.log(257), abs=0.3)
    tokens = np.asarray(data.val.tokens[1:])
    frequency = np.bincount(tokens, minlength=257) / len(tokens)
    entropy = -(frequency[frequency > 0] * np.log2(frequency[frequency > 0])).sum()
    bits = parts.evaluate(code, net, data.val, 128)["loss"] / math.log(2)
    print(f"documentation: {bits:.2f} bits per byte, {entropy:.2f} by frequency alone")
    assert bits < entropy - 0.7
