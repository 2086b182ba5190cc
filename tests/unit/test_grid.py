"""Where ranks are in a grid."""

import pytest

from ringdl import UsageError
from ringdl._grid import Place, describe, place_ranks, shape_for


def test_those_that_talk_most_are_on_one_host() -> None:
    hosts = [0, 1] * 4  # ranks by turns, as some launchers place them
    places = place_ranks(hosts, Place(2, 1, 4))
    for data in range(2):
        assert (
            len({host for host, place in zip(hosts, places, strict=True) if place.data == data})
            == 1
        )
    places = place_ranks(hosts, Place(2, 2, 2))
    for pipeline in range(2):
        its = {
            host for host, place in zip(hosts, places, strict=True) if place.pipeline == pipeline
        }
        assert len(its) == 1, "the pipeline is what crosses hosts"


@pytest.mark.parametrize("shape", [(1, 1, 6), (2, 3, 1), (3, 1, 2), (1, 2, 3), (6, 1, 1)])
@pytest.mark.parametrize(
    "hosts", [[0] * 6, [0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 2, 2], [3, 2, 1, 0, 5, 4]]
)
def test_each_place_once(hosts: list[int], shape: tuple[int, int, int]) -> None:
    places = place_ranks(hosts, Place(*shape))
    assert len({*places}) == 6
    for axis, length in zip(Place._fields, shape, strict=True):
        assert {getattr(place, axis) for place in places} == {*range(length)}


def test_shapes() -> None:
    assert shape_for(8, None, 2, 2) == (2, 2, 2)
    assert shape_for(8, 8, 1, 1) == (8, 1, 1)
    for arguments, text in (
        ((8, 3, 1, 2), "data x pipeline x model = 3 x 1 x 2 is not one of 8 ranks"),
        ((8, None, 3, 1), "data x 3 x 1 is not one of 8 ranks"),
        ((8, 0, 1, 1), "data is 0; pass a number of ranks, at least 1"),
        ((8, 1, 1.5, 1), "pipeline is 1.5"),
        ((8, 1, 1, True), "model is True"),
    ):
        with pytest.raises(UsageError, match=text):
            shape_for(*arguments)


def test_description() -> None:
    assert describe([0, 0, 1, 1], Place(2, 1, 2)).splitlines() == [
        "data 2 ( | ), pipeline 1 (lines), model 2; between hosts: data",
        "stage 0: 0 1 | 2 3",
    ]
    assert describe([0] * 4, Place(1, 2, 2)).splitlines()[0].endswith("between hosts: nothing")
