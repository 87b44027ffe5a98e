from collections import OrderedDict, UserDict
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lightning_robustness._model.batch import check_label_range, read_batch, replace_in_batch

X, Y = torch.rand(3, 2), torch.tensor([4, 0, 7])
NEW = X + 1


class Pair(NamedTuple):
    y: Tensor
    x: Tensor


class Unnamed(NamedTuple):
    first: Tensor
    second: Tensor


@dataclass
class Sample:
    pixel_values: Tensor
    labels: Tensor
    path: Any = None


@dataclass(frozen=True)
class Frozen:
    image: Tensor
    target: Tensor


@dataclass(frozen=True, slots=True)
class Slotted:
    inputs: Tensor
    targets: Tensor


class Encoding(UserDict):
    """Like the batches of transformers: a mapping that is no dict and carries something else."""

    extra = None


class List(list):
    pass


def encoding():
    batch = Encoding({"pixel_values": X, "labels": Y})
    batch.extra = "kept"
    return batch


BATCHES = [
    (X, Y),
    [X, Y],
    List([X, Y]),
    (X, Y, "more", torch.zeros(2)),
    Pair(y=Y, x=X),
    Unnamed(X, Y),
    {"image": X, "label": Y, "path": "somewhere"},
    {"y": Y, "x": X},
    OrderedDict(labels=Y, pixel_values=X),
    MappingProxyType({"input": X, "target": Y}),
    encoding(),
    Sample(X, Y),
    Frozen(X, Y),
    Slotted(X, Y),
]


@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: type(batch).__name__)
def test_inputs_and_labels_are_found_and_replaced(batch):
    x, y, *_ = read_batch(batch)
    assert x is X
    assert y is Y
    replaced = replace_in_batch(batch, NEW)
    assert type(replaced) is type(batch)
    x, y, *_ = read_batch(replaced)
    assert x is NEW
    assert y is Y
    assert read_batch(batch)[0] is X


@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: type(batch).__name__)
def test_a_longer_batch_repeats_the_labels(batch):
    x, y, *_ = read_batch(replace_in_batch(batch, torch.cat([X, NEW])))
    assert torch.equal(x, torch.cat([X, NEW]))
    assert y.tolist() == [4, 0, 7, 4, 0, 7]
    assert read_batch(batch)[1] is Y


@pytest.mark.parametrize("batch", [X, (X,), [X], {"x": X}, {"image": X, "caption": ["a", "b", "c"]}])
def test_no_labels(batch):
    x, y, *_ = read_batch(batch)
    assert x is X
    assert y is None
    assert read_batch(replace_in_batch(batch, NEW))[0] is NEW


def test_other_entries_stay_or_are_repeated():
    batch = {
        "image": X,
        "weights": torch.arange(3.0),
        "paths": ["a", "b", "c"],
        "ids": ("d", "e", "f"),
        "nested": {"boxes": [torch.zeros(n, 4) for n in (1, 3, 5)], "columns": [torch.arange(3)] * 3},
        "pair": Unnamed(torch.arange(3), "abc"),
        "scalar": torch.tensor(2.0),
        "classes": ["cat", "dog"],
        "name": "abc",
    }
    same = replace_in_batch(batch, NEW)
    assert {name: value for name, value in same.items() if name != "image"} == {
        name: value for name, value in batch.items() if name != "image"
    }
    doubled = replace_in_batch(batch, torch.cat([X, NEW]))
    assert doubled["weights"].tolist() == [0.0, 1.0, 2.0, 0.0, 1.0, 2.0]
    assert doubled["paths"] == ["a", "b", "c", "a", "b", "c"]
    assert doubled["ids"] == ("d", "e", "f", "d", "e", "f")
    assert [len(boxes) for boxes in doubled["nested"]["boxes"]] == [1, 3, 5, 1, 3, 5]
    assert [column.tolist() for column in doubled["nested"]["columns"]] == [[0, 1, 2, 0, 1, 2]] * 3
    assert doubled["pair"].first.tolist() == [0, 1, 2, 0, 1, 2]
    assert doubled["pair"].second == "abc"
    assert doubled["scalar"] == 2.0
    assert doubled["classes"] == ["cat", "dog"]
    assert doubled["name"] == "abc"
    assert batch["nested"]["columns"][0].tolist() == [0, 1, 2]
    assert batch["paths"] == ["a", "b", "c"]


def test_a_list_of_inputs_and_labels_is_not_two_samples():
    x, y = torch.rand(2, 3), torch.tensor([0, 1])
    x_longer, y_longer = replace_in_batch([x, y], torch.cat([x, x]))
    assert x_longer.shape == (4, 3)
    assert y_longer.tolist() == [0, 1, 0, 1]


def test_mutable_batches_keep_what_they_carry():
    assert replace_in_batch(encoding(), NEW).extra == "kept"


def test_batch_function():
    batch, calls = {"views": [X, NEW], "one_hot": torch.eye(8)[Y]}, []

    def batch_fn(batch):
        calls.append(batch)
        return batch["views"][0], batch["one_hot"].argmax(dim=1)

    x, y, *_ = read_batch(batch, batch_fn)
    assert len(calls) == 1
    assert x is X
    assert torch.equal(y, Y)
    replaced = replace_in_batch(batch, NEW + 1, batch_fn)
    assert torch.equal(replaced["views"][0], NEW + 1)
    assert replaced["views"][1] is NEW
    assert batch["views"][0] is X


@pytest.mark.parametrize(
    ("batch", "error", "match"),
    [
        (
            (),
            TypeError,
            r"or a mapping, dataclass or named tuple .* but got tuple\. For other batches, pass `batch_fn=",
        ),
        (3, TypeError, r"but got int\."),
        ({"foo": X, "bar": Y}, TypeError, r"named image, .*, input_ids but got dict with 'foo', 'bar'\. .*`batch_fn="),
        ({"x": "path"}, TypeError, r"tensor of shape \(N, \.\.\.\) but got str\. .*`batch_fn="),
        ([(X, Y), (X, Y)], TypeError, r"tensor of shape \(N, \.\.\.\) but got tuple"),
        (torch.tensor(1.0), TypeError, r"but got one of shape \(\)"),
        ((X, ["a", "b", "c"]), TypeError, r"`y` to be an integer tensor but got list\. One-hot or soft"),
        (
            (X, torch.eye(8)[Y]),
            TypeError,
            r"integer tensor but got dtype torch\.float32\. One-hot or soft .*`batch_fn=",
        ),
        ((X, torch.rand(3)), ValueError, r"single-label classification.* real numbers, from .*, as in regression"),
        ((X, 2 * torch.ones(3, 1)), ValueError, r"from 2 to 2\. If they are classes, .*batch\[1\]\.long\(\)"),
        ((X, torch.ones(3, 4)), ValueError, r"4 numbers per sample that do not sum to 1, as in multi-label"),
        ((X, torch.eye(8).long()[Y]), ValueError, r"but there are 8 labels per sample.*\(3, 8\)\)\. One-hot"),
        ((X, Y.reshape(3, 1, 1).expand(3, 4, 4)), ValueError, r"a label for each position, as in segmentation"),
        ((torch.rand(3, 1, 2), torch.rand(3, 1, 2), Y), ValueError, r"looks like other inputs.*Siamese.*batch_fn="),
        ((Y, X, Y), ValueError, r"first entry looks like indices.*`batch_fn=lambda batch: \(batch\[1\], batch\[2\]\)"),
        ((X, Y[:2]), ValueError, r"shape \(3,\), one label per sample, but got \(2,\)"),
    ],
)
def test_bad_batch(batch, error, match):
    with pytest.raises(error, match=match):
        read_batch(batch)


BINARY = torch.tensor([1, 0, 1])


@pytest.mark.parametrize(
    "y",
    [BINARY[:, None], BINARY.float(), BINARY.float()[:, None], BINARY.bool(), BINARY.double(), BINARY.to(torch.int8)],
)
def test_labels_of_binary_classifiers(y):
    assert read_batch((X, y))[1].tolist() == [1, 0, 1]


def test_labels_in_a_column_keep_their_classes():
    assert read_batch((X, Y[:, None]))[1].tolist() == Y.tolist()


def test_soft_labels_where_they_are_wanted():
    soft = 0.7 * torch.eye(8)[Y] + 0.3 * torch.eye(8)[Y.flip(0)]
    assert read_batch((X, soft), soft=True)[1].tolist() == Y.tolist()
    with pytest.raises(ValueError, match="as in multi-label"):
        read_batch((X, torch.ones(3, 4)), soft=True)


@pytest.mark.parametrize(
    ("labels", "match", "batch_fn"),
    [
        ([1, 2, 3], r"from 0 to 2, for 3 classes, .* from 1 to 3\. .*batch\[1\] - 1", lambda b: (b[0], b[1] - 1)),
        (
            [2, -100, 0],
            r"from -100 to 2\. .*`ignore_index`.*batch\[1\] >= 0\]\)`",
            lambda b: (b[0][b[1] >= 0], b[1][b[1] >= 0]),
        ),
        ([-1, 0, 1], "`ignore_index`", lambda b: (b[0][b[1] >= 0], b[1][b[1] >= 0])),
        ([7, 9, 4], r"such as lengths.*lambda batch: \(batch\[0\], batch\[2\]\)", lambda b: (b[0], b[2])),
    ],
)
def test_labels_without_a_class_and_the_remedy(labels, match, batch_fn):
    batch = X, torch.tensor(labels), torch.tensor([2, 0, 1])
    y = read_batch(batch).y
    with pytest.raises(ValueError, match=match):
        check_label_range(y, 3)
    x, y, *_ = read_batch(batch, batch_fn)
    check_label_range(y, 3)
    assert len(x) == len(y) > 1
    check_label_range(y[:0], 3)
    with pytest.raises(ValueError, match="read as two classes; regression cannot be measured"):
        check_label_range(torch.tensor([5]), 2)


@pytest.mark.parametrize("dtype", [torch.long, torch.float32])
@pytest.mark.parametrize("values", [[-1, 1, 1], [-1, -1, -1]])
def test_labels_of_minus_one_and_one_keep_both_classes(values, dtype):
    batch = X, torch.tensor(values, dtype=dtype)
    with pytest.raises(ValueError, match=r"`batch_fn=lambda batch: \(batch\[0\], \(batch\[1\] > 0\)\.long\(\)\)`"):
        check_label_range(read_batch(batch).y, 2)
    y = read_batch(batch, lambda batch: (batch[0], (batch[1] > 0).long())).y
    check_label_range(y, 2)
    assert (2 * y - 1).tolist() == values


@pytest.mark.parametrize(
    ("third", "found"), [(5, "int"), (torch.zeros(3), "Tensor"), ({"mask": "text"}, "str for 'mask'")]
)
def test_the_third_value_of_batch_fn_is_a_dictionary_of_tensors(third, found):
    with pytest.raises(TypeError, match=f"third value of `batch_fn` .* but got {found}"):
        read_batch((X, Y), lambda batch: (*batch, third))


@pytest.mark.parametrize("size", [(), (1,), (2, 4), (4, 4)])
def test_the_third_value_of_batch_fn_has_a_row_per_sample(size):
    with pytest.raises(ValueError, match=r"third value of `batch_fn` .*3 rows.*'mask'"):
        read_batch((X, Y), lambda batch: (*batch, {"mask": torch.ones(size)}))


def test_bad_batch_function():
    with pytest.raises(TypeError, match=r"`batch_fn` to return \(inputs, labels\) or .* but got Tensor"):
        read_batch((X, Y), lambda batch: batch[0])
    with pytest.raises(TypeError, match="but got a tuple of 4"):
        read_batch((X, Y), lambda batch: (*batch, {}, {}))
    with pytest.raises(ValueError, match="to return inputs that are a tensor of the batch itself"):
        replace_in_batch((X, Y), NEW, lambda batch: (batch[0] * 2, batch[1]))


@pytest.mark.parametrize("number", [0, 2, 4])
def test_bad_number_of_inputs(number):
    with pytest.raises(ValueError, match=f"as many inputs as the batch has, 3, or a multiple, but got {number}"):
        replace_in_batch((X, Y), torch.zeros(number, 2))
