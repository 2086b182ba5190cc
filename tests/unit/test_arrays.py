"""Which arrays go into the engine as they are, which are copied, and which are refused."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

import ringdl
from ringdl import _arrays
from ringdl._engine import DType

NAMES = ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
ELEMENTS = st.sampled_from([np.dtype(name) for name in (*NAMES, ml_dtypes.bfloat16)])


def shares(a: np.ndarray, b: np.ndarray) -> bool:
    return a.__array_interface__["data"][0] == b.__array_interface__["data"][0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 4), (2, 0, 3), (1, 1, 5)])
def test_contiguous_arrays_are_not_copied(name: str, shape: tuple[int, ...]) -> None:
    array = np.ones(shape, name)
    operand = _arrays.operand(array, written=True)
    assert operand.array is array
    assert operand.dtype is None
    assert operand.write_back() is array


@pytest.mark.parametrize("shape", [(), (0,), (3, 4)])
def test_bfloat16_travels_as_bits(shape: tuple[int, ...]) -> None:
    array = np.ones(shape, ml_dtypes.bfloat16)
    operand = _arrays.operand(array, written=True)
    assert operand.dtype == DType.bfloat16
    assert operand.array.dtype == np.uint16
    assert operand.array.shape == shape
    assert shares(operand.array, array)
    operand.array[...] = 0x4000
    assert operand.write_back() is array
    assert (array == 2).all()


@st.composite
def views(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """An array and a view of it: sliced, reversed, transposed."""
    base = np.zeros(draw(nps.array_shapes(max_dims=4, max_side=5)), draw(ELEMENTS))
    view = base[draw(nps.basic_indices(base.shape, min_dims=1, allow_newaxis=True))]
    return base, view.transpose(draw(st.permutations(range(view.ndim))))


@given(views())
def test_views_are_written_back(base_and_view: tuple[np.ndarray, np.ndarray]) -> None:
    """What the engine leaves is what the view holds then, and nothing beside it has changed."""
    base, view = base_and_view
    operand = _arrays.operand(view, written=True)
    assert operand.array.flags.c_contiguous
    assert operand.array.shape == view.shape
    one = np.ones((), base.dtype)
    operand.array[...] = one.view(operand.array.dtype)
    assert operand.write_back() is view
    assert (view == one).all()
    assert np.count_nonzero(base.astype(np.float32)) == view.size


@pytest.mark.parametrize("write", [True, False])
@pytest.mark.parametrize(
    ("array", "text"),
    [
        (np.zeros(3, ">f4"), "byte order"),
        (np.zeros(3, np.complex128), "complex128"),
        (np.zeros(3, np.uint16), "uint16"),
        (np.zeros(3, "U4"), "<U4"),
        (np.zeros(3, [("a", "f4")]), "not supported"),
        ([1.0, 2.0], "list"),
        (1.0, "float"),
        (None, "NoneType"),
        (np.float32(1), "float32"),
    ],
)
def test_refused(array: object, text: str, write: bool) -> None:
    with pytest.raises(ringdl.UsageError, match=text):
        _arrays.operand(array, written=write)


def test_read_only_is_for_reading() -> None:
    array = np.arange(6.0).reshape(2, 3)
    array.flags.writeable = False
    assert _arrays.operand(array, written=False).array is array
    for x in (array, array.T):
        with pytest.raises(ringdl.UsageError, match="read-only"):
            _arrays.operand(x, written=True)


@given(views())
def test_copies_are_contiguous_and_apart(base_and_view: tuple[np.ndarray, np.ndarray]) -> None:
    base, view = base_and_view
    copy = _arrays.copy_of(view)
    assert copy.flags.c_contiguous
    assert copy.flags.writeable
    assert copy.dtype == view.dtype
    assert copy.shape == view.shape
    copy[...] = 1
    assert not base.astype(np.float32).any()


def test_copies_of_numbers() -> None:
    for number in (1.5, 2, np.float32(3), np.int8(4), np.bool_(True)):
        copy = _arrays.copy_of(number)
        assert copy.shape == ()
        assert copy == number


@pytest.mark.parametrize("dtype", [*NAMES, ml_dtypes.bfloat16])
def test_gathered(dtype: str) -> None:
    rows = np.arange(12).astype(dtype).reshape(4, 3)
    data = np.frombuffer(bytearray(rows.tobytes()), np.uint8)
    result = _arrays.gathered(np.zeros((9, 3), dtype), 4, data)
    assert result.dtype == rows.dtype
    assert np.array_equal(result, rows)
    empty = _arrays.gathered(np.zeros((2, 0), dtype), 5, np.empty(0, np.uint8))
    assert empty.shape == (5, 0)


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


def test_contiguous_tensors_are_not_copied(torch) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.bool):
        tensor = torch.ones((2, 3), dtype=dtype)
        operand = _arrays.operand(tensor, written=True)
        assert operand.array.data_ptr() == tensor.data_ptr()
        assert operand.write_back() is tensor


def test_views_of_tensors_are_written_back(torch) -> None:
    base = torch.zeros(4, 6)
    view = base.t()[::2]
    operand = _arrays.operand(view, written=True)
    assert operand.array.is_contiguous()
    operand.array.fill_(1)
    assert operand.write_back() is view
    assert view.sum() == view.numel() == base.sum()


def test_parameters_are_detached(torch) -> None:
    parameter = torch.nn.Parameter(torch.zeros(3, 2))
    operand = _arrays.operand(parameter, written=True)
    assert not operand.array.requires_grad
    operand.array.fill_(1)
    assert operand.write_back() is parameter
    assert parameter.requires_grad
    assert parameter.sum() == 6
    assert not _arrays.copy_of(parameter).requires_grad


def test_tensors_refused(torch) -> None:
    cases = {
        "meta": torch.zeros(2, device="meta"),
        "sparse": torch.eye(2).to_sparse(),
    }
    for text, tensor in cases.items():
        with pytest.raises(ringdl.UsageError, match=text):
            _arrays.operand(tensor, written=False)
