import pytest
from omegaconf import DictConfig

from ssl_bench.composition import as_plain, build, choices, compose_config, has_key
from ssl_bench.errors import ConfigurationError

PCA = ["probe=pca", "dataset=toy"]


def test_overrides_reach_the_component_as_plain_python():
    config = compose_config("probing", [*PCA, "probe.num_images=3", "seed=7"])

    probe = build(config.probe)

    assert (probe.num_images, probe.image_size, config.seed) == (3, 224, 7)
    assert type(probe.num_images) is int


def test_as_plain_resolves_references():
    config = compose_config("probing", ["probe=pca", "dataset=folder", "data.root=/photos"])

    assert as_plain(config)["dataset"]["root"] == "/photos"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("probe.num_image=3", r"unknown key 'probe.num_image'; did you mean probe.num_images"),
        ("probe.num_images=many", r"probe.num_images expects a whole number .*got 'many'"),
        ("probe.num_images=2.5", r"expects a whole number"),
        ("probe.num_images=true", r"expects a whole number"),
        ("probe.facet=3", r"probe.facet expects token or token_normed .*, got"),
        ("probe.facet=[key,3]", r"probe.facet expects token or token_normed .*, got"),
        ("dataset=voc2021", r"unknown dataset='voc2021' .*did you mean voc2012"),
        ("probe.num_images", r"expected KEY=VALUE, got 'probe.num_images'"),
        ("probe.num_images=[1", r"num_images"),
        ("probe.num_images=???", r"expects a whole number .*, got '\?\?\?'"),
        ("probe={a: 1}", r"unknown probe="),
        ("probe.new=1", r"unknown key 'probe.new'"),
        ("dataset.cache=[1]", r"dataset.cache expects a path"),
        ("dataset.cache='~nosuchuser/x'", r"dataset.cache expects a path .*, got '~nosuchuser/x'"),
        ("dataset.cache=''", r"dataset.cache expects a path"),
        ("dataset.num_train=1e9", r"dataset.num_train expects a whole number"),
        ("data=3", r"data is no value; override its keys, such as data.KEY=VALUE"),
        (f"probe.num_images={'9' * 5000}", r"cannot read"),
        (f"probe.num_images={'[' * 2000}", r"cannot read"),
        ("probe.num_images=choice(1,2)", r"cannot read"),
        ("probe.num_images=1,2", r"num_images"),
        ("probe.num_images=0", r"num_images expects a whole number in \[1, 1000000000\], got 0"),
    ],
)
def test_a_wrong_override_is_one_line_that_says_what_to_do(override, message):
    with pytest.raises(ConfigurationError, match=message) as caught:
        _built_both(compose_config("probing", [*PCA, override]))

    assert "\n" not in str(caught.value)


def _built_both(config: DictConfig) -> None:
    build(config.probe)
    build(config.dataset)


def test_several_names_may_stand_where_one_is_the_default():
    config = compose_config("probing", ["probe=tokencut", "probe.facet=[token,key]"])

    assert build(config.probe).facets == ("key", "token")


def test_a_whole_number_is_a_number_where_a_fraction_is_the_default():
    config = compose_config("probing", ["probe=tokencut", "probe.tau=0"])

    assert config.probe.tau == 0


@pytest.mark.parametrize("group", ["probe", "dataset", "model", "optimizer", "objective"])
def test_every_file_of_a_group_composes_and_builds(group):
    root = "probing" if group in ("probe", "dataset") else "pretraining"
    base = ["probe=pca"] if root == "probing" else []
    for name in choices(group):
        config = compose_config(root, [*base, f"{group}={name}"])

        assert build(config[group]) is not None
        assert has_key(config, "data.root")


def test_the_presets_of_a_probe_keep_its_keys():
    for preset in choices("probe/segmentation_protocol"):
        config = compose_config(
            "probing", ["probe=segmentation", f"probe/segmentation_protocol={preset}"]
        )

        assert build(config.probe).protocol == preset
