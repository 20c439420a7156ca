"""Names of many modules at once."""

from tapas.ir.patterns import container, containers, spans


def test_names_of_many() -> None:
    for paths in (
        ["h.3", "h.4", "h.5"],
        ["h.0", "h.2"],
        ["h.0", "g"],
        ["layer1", "layer2"],
        ["0", "1"],
        ["h.01"],
        [""],
    ):
        assert containers(paths) == [container(path) for path in paths]
    assert container("model.layers.12") == ("model.layers", 12)
    assert container("layer3") == ("layer", 3)
    assert container("7") == ("", 7)
    assert container("model.norm") is None
    assert [spans(numbers) for numbers in ([4], [2, 0, 1], [0, 3, 4, 5], [])] == ["4", "0-2", "0,3-5", ""]
