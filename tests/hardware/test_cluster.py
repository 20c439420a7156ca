"""Meshes, links and cluster files: what is accepted, what is refused and with which words."""

import json
import subprocess
import sys
import tomllib
from dataclasses import replace

import pytest

from tapas.errors import ClusterError
from tapas.hardware.cluster import ANY, Cluster, Device, Link
from tapas.hardware.cluster_files import cluster_from_dict, cluster_to_dict, clusters, load_cluster
from tapas.hardware.cluster_toml import toml_text
from tapas.hardware.mesh import Mesh, axis_link, check_mesh, parse_mesh, uneven_axes

PRESETS = [
    "a100-80g",
    "a100-40g",
    "h100-sxm",
    "h200-sxm",
    "b200",
    "v100-16g",
    "v100-32g",
    "rtx4090-pcie",
    "cpu-gloo",
]
TOY = Cluster(
    "toy",
    Device("toy device", 10**9, 1e10, (("float32", 1e12), ("bfloat16", 4e12)), 1e-6, 0.5),
    per_node=8,
    intra=Link(100e9, 1e-6),
    inter=Link(10e9, 1e-5),
    source="made up",
)

# ---------------------------------------------------------------------------------------- meshes


@pytest.mark.parametrize(
    ("given", "sizes", "names", "text"),
    [
        ("8", (8,), ("x",), "8"),
        ("2x4", (2, 4), ("x", "y"), "2x4"),
        (" 2 x 4 ", (2, 4), ("x", "y"), "2x4"),
        ("2x2x2", (2, 2, 2), ("x", "y", "z"), "2x2x2"),
        ("dp=2,tp=4", (2, 4), ("dp", "tp"), "dp=2,tp=4"),
        ("dp=2, tp=4", (2, 4), ("dp", "tp"), "dp=2,tp=4"),
        ("1x8", (1, 8), ("x", "y"), "1x8"),
        (8, (8,), ("x",), "8"),
        ((2, 4), (2, 4), ("x", "y"), "2x4"),
        ([4], (4,), ("x",), "4"),
        ({"dp": 2, "tp": 4}, (2, 4), ("dp", "tp"), "dp=2,tp=4"),
        (Mesh((2, 4), ("a", "b")), (2, 4), ("a", "b"), "a=2,b=4"),
    ],
)
def test_meshes_are_read_in_every_form(given, sizes, names, text):
    mesh = parse_mesh(given)
    assert (mesh.sizes, mesh.names, str(mesh)) == (sizes, names, text)
    assert parse_mesh(str(mesh)) == mesh


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("0", "an axis of size 0"),
        ("2x-4", "an axis of size -4"),
        ((2, 0), "an axis of size 0"),
        ("", "not an axis size"),
        ("2x", "not an axis size"),
        ("2*4", "not an axis size"),
        ("two", "not an axis size"),
        ("1_0", "not an axis size"),
        ((2.5, 4), "not an axis size"),
        (("2", "4"), "not an axis size"),
        (None, "not an axis size"),
        ({"dp": "2"}, "not an axis size"),
        ("2x2x2x2", "4 axes"),
        ((), "0 axes"),
        ({}, "0 axes"),
        ("dp=2,dp=4", "names repeat"),
        ("dp=2,4", "'4' has no name"),
        ("dp=2,tp", "'tp' has no size"),
        ("=2", "not a name"),
        ("d p=2", "not a name"),
        ("dp=,tp=2", "not an axis size"),
    ],
)
def test_bad_meshes_are_refused(given, words):
    with pytest.raises(ClusterError, match="mesh") as caught:
        parse_mesh(given)
    assert words in caught.value.fact
    assert caught.value.remedy


def test_a_mesh_must_fit_the_device_count():
    check_mesh(Mesh((2, 4)), TOY)
    check_mesh(Mesh((2, 4)), TOY, 8)
    with pytest.raises(ClusterError, match=r"mesh 2x4: it takes 8 devices, but there are 6 .* product is 6"):
        check_mesh(Mesh((2, 4)), TOY, 6)


# ----------------------------------------------------------------------------------------- links

INTRA, INTER = (100e9, 1e-6), (10e9, 1e-5)


def over(cards: int) -> tuple[float, float]:
    return cards * 10e9, 1e-5


@pytest.mark.parametrize(
    ("mesh", "links"),
    [
        ("8", [INTRA]),
        ("2x4", [INTRA, INTRA]),
        ("2x8", [INTER, INTRA]),
        ("4x4", [over(2), INTRA]),  # two members of the outer group in each node
        ("16", [over(8)]),
        ("8x16", [INTER, over(8)]),
        ("2x2x8", [INTER, INTER, INTRA]),
        ("4x8x2", [INTER, over(4), INTRA]),
        ("1x16x1", [INTRA, over(8), INTRA]),  # an axis of one device moves nothing
        ("2x3", [INTRA, INTRA]),  # uneven, but all in one node
        ("4x3", [INTER, INTER]),  # ranks 6, 7, 8 are cut after 7
        ("2x6", [INTER, over(2)]),  # ranks 6..11 have two members in the first node
        ("12", [over(4)]),  # eight members in one node, four in the other
        ("2x12", [INTER, over(4)]),
    ],
)
def test_an_axis_runs_at_the_speed_of_what_it_crosses(mesh, links):
    mesh = parse_mesh(mesh)
    found = [axis_link(TOY, mesh, axis) for axis in range(len(mesh.sizes))]
    assert found == [Link(*link) for link in links]


def members_per_node(mesh: Mesh, axis: int, per_node: int) -> list[list[int]]:
    """By enumeration: for every group along the axis, how many members each touched node has."""
    stride = 1
    for size in mesh.sizes[axis + 1 :]:
        stride *= size
    groups: dict[int, list[int]] = {}
    for rank in range(mesh.devices):
        coordinate = rank // stride % mesh.sizes[axis]
        groups.setdefault(rank - coordinate * stride, []).append(rank // per_node)
    return [[nodes.count(node) for node in sorted(set(nodes))] for nodes in groups.values()]


@pytest.mark.parametrize("per_node", [1, 2, 4, 6, 8])
@pytest.mark.parametrize("outer", [1, 2, 3, 4])
@pytest.mark.parametrize("middle", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("inner", [1, 2, 3, 4, 5])
def test_links_agree_with_counting_ranks(per_node, outer, middle, inner):
    cluster, mesh = replace(TOY, per_node=per_node), Mesh((outer, middle, inner))
    for axis in range(3):
        counts = members_per_node(mesh, axis, per_node)
        link = axis_link(cluster, mesh, axis)
        if all(len(nodes) == 1 for nodes in counts):
            assert link == TOY.intra
        else:  # never faster than the node with the fewest members allows
            assert link.latency_seconds == TOY.inter.latency_seconds
            fewest = min(min(nodes) for nodes in counts if len(nodes) > 1)
            assert TOY.inter.bytes_per_s <= link.bytes_per_s <= min(fewest * TOY.inter.bytes_per_s, 100e9)


def test_network_cards_together_are_no_faster_than_the_node():
    cluster = replace(TOY, intra=Link(50e9, 1e-6))
    assert axis_link(cluster, Mesh((16,)), 0) == Link(50e9, 1e-5)


def test_without_a_switch_a_group_has_the_links_between_its_members():
    paired = replace(TOY, per_node=4, switched=False)
    whole = TOY.intra.bytes_per_s
    assert [axis_link(paired, parse_mesh(mesh), 0).bytes_per_s / whole for mesh in ("2", "3", "4")] == [1 / 3, 2 / 3, 1]
    assert [axis_link(paired, parse_mesh("2x2"), axis).bytes_per_s / whole for axis in range(2)] == [1 / 3, 1 / 3]
    assert axis_link(paired, parse_mesh("2x4"), 1).bytes_per_s == whole
    assert axis_link(paired, parse_mesh("2x4"), 0) == axis_link(replace(paired, switched=True), parse_mesh("2x4"), 0)
    for again in (cluster_from_dict(cluster_to_dict(paired)), cluster_from_dict(tomllib.loads(toml_text(paired)))):
        assert not again.switched
    with pytest.raises(ClusterError, match="switched is 'no'"):
        cluster_from_dict(cluster_to_dict(paired) | {"switched": "no"})


def test_between_racks_there_is_a_third_speed():
    racks = replace(TOY, per_rack=32, spine=Link(1e9, 2e-5))
    assert [axis_link(racks, parse_mesh("2x4x8"), axis) for axis in range(3)] == [
        Link(1e9, 2e-5), axis_link(TOY, parse_mesh("2x4x8"), 1), TOY.intra
    ]  # fmt: skip
    assert axis_link(racks, parse_mesh("64"), 0).bytes_per_s == min(
        32e9, axis_link(TOY, parse_mesh("64"), 0).bytes_per_s
    )
    assert axis_link(racks, parse_mesh("4x8"), 0) == axis_link(TOY, parse_mesh("4x8"), 0)  # one rack is enough
    assert cluster_from_dict(cluster_to_dict(racks)) == cluster_from_dict(tomllib.loads(toml_text(racks)))
    assert cluster_from_dict(cluster_to_dict(racks)).spine == racks.spine
    assert racks.slowed(2).spine == Link(0.5e9, 4e-5)
    for wrong in ({"per_rack": 12}, {"per_rack": 8}, {"spine": None}):
        data = {k: v for k, v in (cluster_to_dict(racks) | wrong).items() if v is not None}
        with pytest.raises(ClusterError, match=r"rack|spine"):
            cluster_from_dict(data)


# --------------------------------------------------------------------------------------- presets


def test_presets_are_there_and_plausible():
    assert list(clusters()) == PRESETS
    for name, cluster in clusters().items():
        assert load_cluster(name) == cluster and cluster.name == name
        assert "ssumed" in cluster.source
        assert ("atasheet" in cluster.source) or name == "cpu-gloo"
        assert cluster.intra.bytes_per_s > cluster.inter.bytes_per_s
        assert cluster.intra.latency_seconds <= cluster.inter.latency_seconds
        assert cluster.device.rate("float32") >= cluster.device.rate("float64")


def test_presets_cannot_be_changed_by_the_caller():
    clusters().clear()
    assert list(clusters()) == PRESETS


def test_rates_are_peak_times_efficiency():
    h100 = load_cluster("h100-sxm").device
    assert h100.rate("bfloat16") == 989e12 * 0.6
    assert h100.rate("int64") == h100.rate("bool") == h100.rate("float32") == 67e12 * 0.6
    v100 = load_cluster("v100-32g").device
    assert v100.rate("bfloat16") == v100.rate("float32")  # has no bfloat16 units


@pytest.mark.parametrize("name", ["h100-smx", "h100", "B200"])
def test_unknown_presets_get_the_nearest_names(name):
    with pytest.raises(ClusterError, match="no preset of this name") as caught:
        load_cluster(name)
    assert {"h100-smx": "h100-sxm", "h100": "h100-sxm", "B200": "b200"}[name] in caught.value.remedy


def test_no_torch_is_needed():
    code = "import sys; from tapas.hardware.cluster_files import clusters; clusters(); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# ----------------------------------------------------------------------------------------- files

TOML = """
name = "mine"
per_node = 4
source = "measured"
[device]
name = "card"
memory_bytes = 24e9
memory_bytes_per_s = 1e12
launch_seconds = 4e-6
efficiency = 0.7
[device.flops_per_s]
float32 = 80e12
bfloat16 = 160e12
[intra]
bytes_per_s = 100e9
latency_seconds = 3e-6
[inter]
bytes_per_s = 10e9
efficiency = 0.8
latency_seconds = 1e-5
"""


def write(tmp_path, text: str, name: str = "mine.toml"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_files_are_read(tmp_path):
    cluster = load_cluster(write(tmp_path, TOML))
    assert cluster.name == "mine" and cluster.per_node == 4
    assert cluster.device.memory_bytes == 24 * 10**9 and isinstance(cluster.device.memory_bytes, int)
    assert cluster.intra == Link(100e9, 3e-6)
    assert cluster.inter == Link(8e9, 1e-5)  # the link's efficiency is multiplied in
    as_json = write(tmp_path, json.dumps(tomllib.loads(TOML)), "mine.json")
    assert load_cluster(str(as_json)) == cluster
    assert load_cluster(cluster) is cluster


def test_families_may_be_given_and_come_from_the_measured_device_otherwise(tmp_path):
    measured = load_cluster("h200-sxm").device
    plain = load_cluster(write(tmp_path, TOML)).device
    assert plain.family("norm") == measured.family("norm") and plain.family("matmul").flops == plain.efficiency == 0.7
    given = TOML.replace("efficiency = 0.7", "efficiency = 0.7\nfamilies = { norm = { forward = 0.5, back = 2 } }")
    own = load_cluster(write(tmp_path, given)).device
    assert (own.family("norm").forward, own.family("norm").backward, own.family("norm").back) == (0.5, 1.0, 2.0)
    assert own.family("pointwise") == measured.family("pointwise")
    for wrong, words in (("nrm", "unknown key device.families.nrm"), ("norm", "device.families.norm.forward is 50")):
        text = given.replace("norm = ", f"{wrong} = ").replace("forward = 0.5", "forward = 50")
        with pytest.raises(ClusterError, match=words):
            load_cluster(write(tmp_path, text))


def test_collectives_may_be_slower_than_latency_and_bandwidth_say(tmp_path):
    given = TOML.replace("latency_seconds = 3e-6", "latency_seconds = 3e-6\ntimes = { all_gather = [1.5, 2] }")
    cluster = load_cluster(write(tmp_path, given))
    assert cluster.intra.times == ((ANY, (("all_gather", (1.5, 2.0)),)),) and cluster.inter.times == ()
    for again in (cluster_from_dict(cluster_to_dict(cluster)), cluster_from_dict(tomllib.loads(toml_text(cluster)))):
        assert again.intra == cluster.intra
    for wrong, words in (
        ("[0]", r"all_gather\[0\] is 0"),
        ("[]", "is \\[\\]"),
        ("2", "is 2"),
        ("[1, 'x']", r"\[1\] is 'x'"),
    ):
        with pytest.raises(ClusterError, match=words):
            load_cluster(write(tmp_path, given.replace("[1.5, 2]", wrong)))
    with pytest.raises(ClusterError, match=r"unknown key intra\.times\.gather"):
        load_cluster(write(tmp_path, given.replace("all_gather", "gather")))


def test_name_and_source_may_be_left_out(tmp_path):
    text = TOML.replace('name = "mine"\n', "").replace('source = "measured"\n', "")
    cluster = load_cluster(write(tmp_path, text, "lab.toml"))
    assert (cluster.name, cluster.source) == ("lab", "given by the user in lab.toml")


@pytest.mark.parametrize("name", PRESETS)
def test_clusters_go_through_json_and_back(name):
    cluster = load_cluster(name)
    assert cluster_from_dict(json.loads(json.dumps(cluster_to_dict(cluster)))) == cluster


@pytest.mark.parametrize(
    ("line", "instead", "words", "remedy"),
    [
        ("per_node = 4", "", "per_node is missing", "number of devices"),
        ("per_node = 4", "per_node = 0", "per_node is 0", "1 or more"),
        ("per_node = 4", "per_node = 2.5", "per_node is 2.5", "1 or more"),
        ("per_node = 4", "per_node = true", "per_node is True", "1 or more"),
        ("per_node = 4", "pernode = 4", "unknown key pernode", "did you mean per_node"),
        ("memory_bytes = 24e9", "memory_bytes = 24", "device.memory_bytes is 24", "80e9"),
        ("memory_bytes = 24e9", "memory_bytes = -1", "device.memory_bytes is -1", "80e9"),
        ("memory_bytes = 24e9", "memory_gb = 24", "unknown key device.memory_gb", "memory_bytes"),
        ("memory_bytes_per_s = 1e12", "memory_bytes_per_s = nan", "memory_bytes_per_s is nan", "bytes per second"),
        ("launch_seconds = 4e-6", "launch_seconds = 4", "device.launch_seconds is 4", "3 microseconds"),
        ("efficiency = 0.7", "efficiency = 70", "device.efficiency is 70", "up to 1"),
        ("efficiency = 0.7", "efficiency = 0.0", "device.efficiency is 0.0", "above 0"),
        ("efficiency = 0.8", "efficiency = 1.1", "inter.efficiency is 1.1", "up to 1"),
        ("float32 = 80e12", "", "device.flops_per_s.float32 is missing", "989e12"),
        ("float32 = 80e12", "float32 = 80", "device.flops_per_s.float32 is 80", "989e12"),
        ("float32 = 80e12", "float23 = 80e12", "unknown key device.flops_per_s.float23", "float32"),
        ("bytes_per_s = 100e9", "bytes_per_s = 100", "intra.bytes_per_s is 100", "450e9 for 450 GB/s"),
        ("bytes_per_s = 100e9", "bytes_per_s = 1e18", "intra.bytes_per_s is 1e+18", "450e9"),
        ("bytes_per_s = 100e9", "bytes_per_s = '100 GB'", "intra.bytes_per_s is '100 GB'", "450e9"),
        ("bytes_per_s = 100e9", "bytes_per_s = 0", "intra.bytes_per_s is 0", "450e9"),
        ("latency_seconds = 1e-5", "latency_seconds = 10", "inter.latency_seconds is 10", "3 microseconds"),
        ("latency_seconds = 1e-5", "latency_seconds = -1e-5", "inter.latency_seconds is -1e-05", "3 microseconds"),
        ("latency_seconds = 1e-5", "", "inter.latency_seconds is missing", "3 microseconds"),
        ('name = "card"', "name = 7", "device.name is 7", "text in quotes"),
        ('[device]\nname = "card"', '[devise]\nname = "card"', "unknown key devise", "did you mean device"),
        ("per_node = 4", "per_node == 4", "is not valid TOML", "correct it"),
        ("per_node = 4", "per_node = 4\nintra = 3", "is not valid TOML", "correct it"),
    ],
)
def test_bad_files_name_file_key_value_and_remedy(tmp_path, line, instead, words, remedy):
    assert line in TOML
    path = write(tmp_path, TOML.replace(line, instead, 1))
    with pytest.raises(ClusterError) as caught:
        load_cluster(path)
    assert str(path) in caught.value.place
    assert words in caught.value.fact
    assert remedy in caught.value.remedy


def test_a_missing_table_is_named(tmp_path):
    with pytest.raises(ClusterError, match="inter is missing; add a table inter with bytes_per_s"):
        load_cluster(write(tmp_path, TOML[: TOML.index("[inter]")]))


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.json", "{", "is not valid JSON"),
        ("a.json", "[1, 2]", "the description is [1, 2]"),
        ("a.json", '{"device": 3}', "device is 3"),
        ("a.json", "[" * 100_000, "is not valid JSON"),
        ("a.toml", "", "device is missing"),
    ],
)
def test_files_that_are_something_else(tmp_path, name, text, words):
    with pytest.raises(ClusterError) as caught:
        load_cluster(write(tmp_path, text, name))
    assert words in caught.value.fact


def test_files_that_cannot_be_read(tmp_path):
    for path in (tmp_path / "none.toml", str(tmp_path / "none"), "none.json", tmp_path):
        with pytest.raises(ClusterError, match="cannot be read"):
            load_cluster(path)
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ClusterError, match="is not valid TOML"):
        load_cluster(tmp_path / "bytes.toml")


def test_the_example_in_the_help_is_a_cluster(tmp_path):
    from tapas.cli.main import clusters as command

    lines = [line.strip() for line in (command.__doc__ or "").splitlines() if " = " in line]
    found = load_cluster(write(tmp_path, "\n".join(lines), "mine.toml"))
    assert found.per_node == 4 and found.device.name == "my GPU" and found.name == "mine"


@pytest.mark.parametrize(
    ("mesh", "words"),
    [("2x8", ""), ("4x4", ""), ("8", ""), ("16", ""), ("5", ""), ("3x5", "5 devices along y take 0.625 nodes of 8"),
     ("2x12", "12 devices along y take 1.5 nodes of 8"), ("3x4", "12 devices along x take 1.5 nodes")],
)  # fmt: skip
def test_axes_that_do_not_line_up_with_nodes(mesh, words):
    found = uneven_axes(parse_mesh(mesh), load_cluster("h100-sxm"))
    assert (words in found[0]) if words else not found
