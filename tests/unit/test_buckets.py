"""How gradients are planned into buckets, and buckets on one rank (tests/ranks has more ranks)."""

from __future__ import annotations

import gc
import itertools
import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ringdl
from ringdl import Buckets, _engine
from ringdl._buckets import _first_difference
from ringdl._communicator import communicator_over

SIZES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


@pytest.fixture
def comm():
    communicator = communicator_over(_engine.alone())
    yield communicator
    communicator.shutdown()


def plan(specs, bucket_bytes: int, first_bucket_bytes: int) -> list[list[int]]:
    entries = [(name, list(shape), _engine.DType[dtype], []) for name, shape, dtype in specs]
    return _engine.plan_buckets(entries, bucket_bytes, first_bucket_bytes)


SPECS = st.lists(
    st.tuples(st.lists(st.integers(0, 9), max_size=3), st.sampled_from(list(SIZES))), max_size=30
).map(lambda items: [(f"p{i}", shape, dtype) for i, (shape, dtype) in enumerate(items)])


@given(SPECS, st.integers(1, 3000), st.integers(1, 3000))
def test_plan(specs, bucket_bytes: int, first_bucket_bytes: int) -> None:
    """Every gradient once; one dtype per bucket, from the last to the first; closed when full."""
    buckets = plan(specs, bucket_bytes, first_bucket_bytes)
    assert sorted(itertools.chain(*buckets)) == list(range(len(specs)))
    assert all(buckets)
    for dtype, item_bytes in SIZES.items():
        own = [bucket for bucket in buckets if specs[bucket[0]][2] == dtype]
        order = [index for bucket in own for index in bucket]
        assert order == [i for i in reversed(range(len(specs))) if specs[i][2] == dtype]
        for number, bucket in enumerate(own):
            limit = first_bucket_bytes if number == 0 else bucket_bytes
            sizes = [math.prod(specs[index][1]) * item_bytes for index in bucket]
            padded = [-(-size // 64) * 64 for size in sizes]
            assert sum(sizes[:-1]) < limit, "closed too late"
            assert sum(padded) >= limit or number == len(own) - 1, "closed too early"


def test_plan_is_in_the_order_of_completion() -> None:
    """Gradients come from the last to the first: the bucket that is complete first starts first."""
    specs = [("a", [1], "float32"), ("b", [1], "float64"), ("c", [1], "float32")]
    assert plan(specs, 1 << 20, 1 << 20) == [[1], [2, 0]]
    assert plan(specs, 1, 1) == [[2], [1], [0]]
    assert plan([], 1, 1) == []


def test_views_hold_what_was_asked_for(comm) -> None:
    specs = [
        ("a", (2, 3), np.float32),
        ("b", (2, 3), np.dtype("float64"), (1, 2)),
        ("c", (4,), ml_dtypes.bfloat16),
        ("d", (), "float16"),
        ("e", (0, 5), "float32"),
        ("f", (2, 3, 4, 4), "float32", (48, 1, 12, 3)),
    ]
    buckets = Buckets(specs, communicator=comm)
    views = buckets.views()
    for view, (_, shape, dtype, *strides) in zip(views, specs, strict=True):
        assert view.shape == shape
        assert view.dtype == np.dtype(dtype)
        assert view.flags.writeable
        assert view.size == 0 or view.__array_interface__["data"][0] % 64 == 0
        if strides:
            assert tuple(s // view.itemsize for s in view.strides) == strides[0]
        assert not view.astype(np.float64).any()
        view[...] = 1
    for again in buckets.views():
        assert (again == 1).all()


def test_rounds_alone(comm) -> None:
    buckets = Buckets([("a", (3,), "float32"), ("b", (2,), "float32")], communicator=comm)
    a, b = buckets.views()
    a[...], b[...] = 1, 2
    buckets.ready(0)
    assert buckets.wait() == [True, False]
    assert a.tolist() == [1, 1, 1]
    assert b.tolist() == [0, 0], "missing gradients are zeroed"
    assert buckets.wait() == [False, False]
    assert a.tolist() == [0, 0, 0]


def test_views_outlive_their_buckets(comm) -> None:
    buckets = Buckets([("a", (100_000,), "float32")], communicator=comm)
    (view,) = buckets.views()
    view[...] = 3
    del buckets
    gc.collect()
    others = [np.zeros(100_000, np.float32) for _ in range(10)]
    assert (view == 3).all()
    assert not any(other.any() for other in others)


def test_dlpack_is_the_same_memory(comm) -> None:
    torch = pytest.importorskip("torch")
    specs = [("a", (2, 3), "bfloat16", (1, 2)), ("b", (), "float64"), ("c", (0,), "float16")]
    buckets = Buckets(specs, communicator=comm)
    tensors = [torch.from_dlpack(buckets.dlpack(index)) for index in range(3)]
    assert [tensor.dtype for tensor in tensors] == [torch.bfloat16, torch.float64, torch.float16]
    assert tensors[0].stride() == (1, 2)
    tensors[0][1, 2] = 7
    tensors[1].fill_(5)
    assert buckets.views()[0][1, 2] == 7
    assert buckets.views()[1] == 5
    del buckets
    gc.collect()
    assert tensors[0][1, 2] == 7


@pytest.mark.parametrize(
    ("specs", "options", "text"),
    [
        ([("a", (3,), "int32")], {}, "int32"),
        ([("a", (3,), "complex64")], {}, "complex64"),
        ([("a", (3,), bool)], {}, "bool"),
        ([("a", (3,), "float32"), ("a", (3,), "float32")], {}, "'a'"),
        ([("a", (-1,), "float32")], {}, "'a'"),
        ([("a", (2, 3), "float32", (4, 1))], {}, "dense"),
        ([("a", (2, 3), "float32", (1,))], {}, "strides"),
        ([("a", (2, 3), "float32", (3, -1))], {}, "dense"),
        ([("a", (3,))], {}, r"spec is \('a', \(3,\)\); pass \(name, shape, dtype\)"),
        ([("a", (3,), "float32", (1,), 5)], {}, "spec is"),
        (["a"], {}, "spec is 'a'"),
        ([3], {}, "spec is 3"),
        (3, {}, "specs is 3; pass a list"),
        ([(1, (3,), "float32")], {}, "the name of a gradient is 1"),
        ([("a", 3, "float32")], {}, "the shape of gradient 'a' is 3"),
        ([("a", (3.0,), "float32")], {}, "the shape of gradient 'a'"),
        ([("a", (1 << 70,), "float32")], {}, "the shape of gradient 'a'.*fit in memory"),
        ([("a", (3,), object())], {}, "has dtype <object"),
        ([("a", (3,), None, 1)], {}, "strides of gradient 'a' is 1"),
        ([("a", (3,), "float32")], {"bucket_bytes": "1"}, "bucket_bytes is '1'"),
        ([("a", (3,), "float32")], {"op": "sum"}, "not 'sum'"),
        ([("a", (3,), "float32")], {"bucket_bytes": 0}, "bucket_bytes"),
        ([("a", (3,), "float32")], {"first_bucket_bytes": -1}, "bucket_bytes"),
        ([("a", (3,), "float32")], {"op": ringdl.Max}, "Max"),
    ],
)
def test_refused(comm, specs, options, text: str) -> None:
    with pytest.raises(ringdl.UsageError, match=f"(?i){text}"):
        Buckets(specs, communicator=comm, **options)
    Buckets([("a", (3,), "float32")], communicator=comm).wait()


def test_what_is_no_gradient_is_not_ready(comm) -> None:
    buckets = Buckets([("a", (3,), "float32")], communicator=comm)
    for index in (1, -1, "a", 1 << 70):
        with pytest.raises(ringdl.UsageError, match="ready"):
            buckets.ready(index)
    with pytest.raises(ringdl.UsageError, match="timeout is 'soon'"):
        buckets.wait("soon")  # type: ignore[arg-type]
    buckets.wait()


@pytest.mark.parametrize("call", [("3",), (2.5,), (2, "flot32"), ((2, "3"),), (-1,)])
def test_empty_arrays_refused(comm, call: tuple) -> None:
    with pytest.raises(ringdl.UsageError, match="empty"):
        comm.empty(*call)


def test_no_gradients_at_all(comm) -> None:
    buckets = Buckets([], communicator=comm)
    assert buckets.plan == []
    assert buckets.views() == []
    assert buckets.wait() == []


def test_the_first_difference_is_named() -> None:
    terms = {"bucket_bytes": 5}
    w, v = ["w", [2, 3], "float32", []], ["v", [2], "float16", []]
    cases = [
        ([[{"bucket_bytes": 6}, [w]], [terms, [w]]], "bucket_bytes is 6 on rank 0 and 5 on rank 1"),
        (
            [[terms, [w]], [terms, [w, v]]],
            'name of gradient 1 is nothing on rank 0 and "v" on rank 1',
        ),
        (
            [[terms, [w]], [terms, [["w", [3, 2], "float32", []]]], [terms, [w]]],
            "shape of gradient 0 ('w') is [2, 3] on ranks 0, 2 and [3, 2] on rank 1",
        ),
        (
            [[terms, [w, v]], [terms, [v, w]]],
            'name of gradient 0 is "w" on rank 0 and "v" on rank 1',
        ),
        ([[terms, [v]], [terms, [["v", [2], "float64", []]]]], "dtype of gradient 0 ('v')"),
        ([[terms, [v]], [terms, [["v", [2], "float16", [1]]]]], "strides of gradient 0 ('v')"),
    ]
    for plans, text in cases:
        assert text in _first_difference(plans)
