"""Operations of the user's own: their kernels, their digests, and what is refused."""

import ctypes
import math
import subprocess
import sys
import types
from collections.abc import Callable

import numpy as np
import pytest

import ringdl
from ringdl._engine import DType

FLOATS = ("float64", "float32")
INTEGERS = ("int64", "int32", "int16", "int8", "uint8")
SCALE = 3.0


def apply(op: ringdl.CustomOp, into: np.ndarray, other: np.ndarray) -> np.ndarray:
    """What the kernel makes of a copy of `into`."""
    prototype = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
    result = into.copy()
    kernel = prototype(op.address(DType[into.dtype.name]))
    kernel(result.ctypes.data, other.ctypes.data, into.size)
    return result


def log_sum_exp(a, b):
    return max(a, b) + math.log1p(math.exp(-abs(a - b)))


def larger(a, b):
    return a if abs(a) >= abs(b) else b


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("count", [0, 1, 7, 1000])
def test_floats(dtype: str, count: int) -> None:
    a, b = np.random.default_rng(count).normal(size=(2, count)).astype(dtype)
    result = apply(ringdl.custom_op(log_sum_exp), a, b)
    np.testing.assert_allclose(
        result, np.logaddexp(a, b), rtol=1e-6 if dtype == "float32" else 1e-14
    )


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_wrap(dtype: str) -> None:
    a, b = np.random.default_rng(1).integers(-100, 100, (2, 500)).astype(dtype)
    assert (apply(ringdl.custom_op(lambda a, b: a * b + a + b), a, b) == a * b + a + b).all()
    larger_of = np.where(np.abs(a.astype(int)) >= np.abs(b.astype(int)), a, b)
    assert (apply(ringdl.custom_op(larger), a, b) == larger_of).all()


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda a, b: a ^ b, [0, 1, 1, 0]),
        (lambda a, b: a and b, [0, 0, 0, 1]),
        (lambda a, b: a + b, [0, 1, 1, 1]),  # 2 is true
    ],
)
def test_bools_stay_zero_or_one(fn: Callable[[object, object], object], expected: list) -> None:
    a, b = np.array([0, 0, 5, 5], np.uint8), np.array([0, 9, 0, 1], np.uint8)  # as views may be
    result = apply(ringdl.custom_op(fn), a.view(bool), b.view(bool))
    assert result.view(np.uint8).tolist() == expected


def test_dividing_by_zero_is_as_in_numpy() -> None:
    result = apply(ringdl.custom_op(lambda a, b: a / b), np.array([1.0, 0.0]), np.zeros(2))
    np.testing.assert_array_equal(result, [np.inf, np.nan])


def test_a_kernel_outlives_its_operation() -> None:
    op = ringdl.custom_op(lambda a, b: a + 2 * b)
    address = op.address(DType.float32)
    del op
    assert ringdl.custom_op(lambda a, b: a + 2 * b, "other").address(DType.float32) != address
    assert ringdl.custom_op(lambda a, b: a + 2 * b).address(DType.float32) == address
    assert ringdl.custom_op(lambda a, b: a + 2 * b).address(DType.float64) != address


def made(body: str, **values: object) -> int:
    """The digest of a function with this body, in a module of its own."""
    namespace = {"math": math, "np": np, **values}
    exec(f"def fn(a, b):\n    {body}", namespace)
    return ringdl.custom_op(namespace["fn"]).digest


def test_digests_tell_functions_apart() -> None:
    digests = [
        made("return a + b"),
        made("return a - b"),
        made("return a + b + 1"),
        made("return a + b + 2"),
        made("return a + b + 1.0"),
        made("return math.sin(a + b)"),
        made("return math.cos(a + b)"),
        made("return a + b + k", k=1),
        made("return a + b + k", k=2),
        made("return a + b + k[0]", k=np.zeros(3)),
        made("return a + b + k[0]", k=np.ones(3)),
        made("return (lambda c: c + 1)(a + b)"),
        made("return (lambda c: c + 2)(a + b)"),
        made("return k(a + b)", k=lambda c: c + 1),
        made("return k(a + b)", k=lambda c: c + 2),
        made("return k(a + b)", k=lambda c: c + SCALE),
        ringdl.custom_op(larger, "one").digest,
        ringdl.custom_op(larger, "two").digest,
    ]
    assert len(set(digests)) == len(digests)
    assert all(0 <= digest < 1 << 64 for digest in digests)
    assert made("return a + b") == digests[0]
    assert made("return a + b + k[0]", k=np.ones(3)) == digests[10]


def test_digests_of_closures_and_of_values_in_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    def scaled_by(k: float) -> ringdl.CustomOp:
        return ringdl.custom_op(lambda a, b: a + k * b, "scaled")

    assert scaled_by(2.0).digest == scaled_by(2.0).digest != scaled_by(3.0).digest
    before = made("return a + math.tau * b")
    monkeypatch.setattr(math, "tau", 6.0)
    assert made("return a + math.tau * b") != before
    inner, outer = types.ModuleType("inner"), types.ModuleType("outer")
    outer.inner = inner  # type: ignore[attr-defined]
    digests = set()
    for value in ((1.0,), (2.0,), np.ones(1), np.zeros(1), np.int64(1), np.int64(2)):
        inner.its = outer.its = value  # type: ignore[attr-defined]
        for text in ("return a + outer.its[0]", "return a + outer.inner.its[0]"):
            digests.add(made(text, outer=outer))
    assert len(digests) == 12


def test_digests_are_the_same_in_every_process() -> None:
    program = (
        "import ringdl, math\n"
        "def f(a, b): return a if b in {'x', 'y', 'z', 1} else math.exp(b) + K\n"
        "K = 0.1; print(ringdl.custom_op(f).digest)"
    )
    command = [sys.executable, "-c", program]
    digests = {
        subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
        for _ in range(3)
    }
    assert len(digests) == 1


def raises(a, b):
    assert a > b
    return a


def calls_what_raises(a, b):
    return raises(a, b)


def looks_up(a, b):
    return TABLE[a] + b


TABLE: dict[int, int] = {}


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (raises, "'raises' raises, in raises, and nobody could catch that"),
        (calls_what_raises, "'calls_what_raises' raises, in raises"),
        (looks_up, "'looks_up' refers to {}, a dict, which ranks cannot compare"),
        (lambda a: a, "custom_op takes a Python function of two arguments, not <function"),
        (max, "custom_op takes a Python function of two arguments, not <built-in function max>"),
        ("sum", "custom_op takes a Python function of two arguments, not 'sum'"),
    ],
)
def test_what_cannot_be_an_operation_is_refused(fn: object, words: str) -> None:
    with pytest.raises(ringdl.UsageError, match=words):
        ringdl.custom_op(fn)


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda a, b: a.length + b, "for float32: Unknown attribute 'length' of type float32"),
        (lambda a, b: a + absent, "for float32: NameError: name 'absent' is not defined"),  # noqa: F821
        (lambda a, b: (a, b), "for float32: it returns UniTuple.*, not a number"),
        (lambda a, b: a if a > b else None, "for float32: it returns OptionalType.*, not a number"),
        (lambda a, b: a + b * 1j, "for float32: it returns complex128, not a number"),
        (lambda a, b: np.linalg.absent(a, b), "has no attribute 'absent'"),
    ],
)
def test_what_numba_cannot_compile_is_refused_in_one_line(fn, words: str) -> None:
    with pytest.raises(
        ringdl.UsageError, match=f"custom_op 'it' cannot be compiled .*{words}"
    ) as e:
        ringdl.custom_op(fn, "it").address(DType.float32)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("dtype", [DType.float16, DType.bfloat16])
def test_narrow_floats_are_refused(dtype: DType) -> None:
    words = f"custom_op 'larger' does not take {dtype.name}, which Numba lacks; use float32"
    with pytest.raises(ringdl.UsageError, match=words):
        ringdl.custom_op(larger).address(dtype)


def test_a_missing_numba_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(ringdl.UsageError, match=r"pip install 'ringdl\[numba\]'"):
        ringdl.custom_op(lambda a, b: b).address(DType.int32)


def test_values_that_change_before_the_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks have compared what the values were."""
    op = ringdl.custom_op(lambda a, b: SCALE * (a + b))
    monkeypatch.setitem(globals(), "SCALE", 5.0)
    with pytest.raises(ringdl.UsageError, match="changed since it was made"):
        op.address(DType.float64)
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    x = np.ones(2)
    assert (apply(op, x, x) == 6).all()
    monkeypatch.setitem(globals(), "SCALE", 5.0)
    assert (apply(op, x, x) == 6).all()


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, "bool"])
def test_kernels_of_devices(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled without a device: code for one, with a kernel of the name that is returned."""
    pytest.importorskip("numba_cuda")
    from numba.cuda import compiler, dispatcher

    from ringdl import _custom_op_cuda

    device = types.SimpleNamespace(compute_capability=(9, 0))
    for module in (compiler, dispatcher):
        monkeypatch.setattr(module, "get_current_device", lambda: device)
    function = log_sum_exp if dtype in FLOATS else larger
    code, name = _custom_op_cuda.compiled(function, DType[dtype], 90, 13999)
    assert code.startswith(b"\x7fELF")
    assert f".text.{name}".encode() in code


def test_what_numba_itself_has_for_devices_is_refused() -> None:
    """It is what `numba.cuda` is where the .pth file of numba-cuda did not run."""
    program = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if type(f).__name__ != "NumbaCudaFinder"]
from ringdl import _custom_op_cuda
from ringdl._engine import DType
try:
    _custom_op_cuda.compiled(lambda a, b: a + b, DType.float32, 90, 13000)
except Exception as error:
    print(error)
"""
    command = [sys.executable, "-c", program]
    assert subprocess.check_output(command, text=True) == (
        "numba.cuda is Numba's own, not that of numba-cuda; "
        "pip install 'numba-cuda[cu13]' into the interpreter's site-packages\n"
    )
