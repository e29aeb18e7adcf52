"""What names of deployments say. The rest of the module is Ray's, see tests/integration/test_ray.py."""

from __future__ import annotations

import pytest

from shoal.backends import parse_address
from shoal.backends.ray.cluster import (
    DeploymentId,
    DeploymentState,
    deployment_name,
    find_models,
    is_loaded_later,
    loaded_application,
)
from shoal.errors import AddressError

HEALTHY = DeploymentState("HEALTHY", "", {"RUNNING": 2, "STOPPING": 0})


def test_models_of_an_application_are_found_by_name() -> None:
    """The front is none, and other applications are not looked at."""
    loaded = DeploymentId(loaded_application("shoal", "org/b"), deployment_name("org/b"))
    mine = DeploymentId("shoal", "a")
    others = [DeploymentId("shoal", "front"), DeploymentId("other", "c"), DeploymentId("shoal.d", "x")]
    assert find_models(dict.fromkeys([mine, loaded, *others], HEALTHY), "shoal") == {"a": mine, "org/b": loaded}
    assert [is_loaded_later(each) for each in (mine, loaded)] == [False, True]


@pytest.mark.parametrize(
    ("state", "text", "failed"),
    [
        (HEALTHY, "2 running", False),
        (DeploymentState("HEALTHY"), "scaled to zero", False),
        (DeploymentState("UPSCALING", "", {"STARTING": 1}), "upscaling: 1 starting", False),
        (DeploymentState("UNHEALTHY", "", {"RUNNING": 1}), "unhealthy: 1 running", False),
        (DeploymentState("DEPLOY_FAILED"), "deploy failed: no replica", True),
    ],
)
def test_a_state_in_words(state: DeploymentState, text: str, failed: bool) -> None:
    assert (str(state), state.failed) == (text, failed)


@pytest.mark.parametrize("text", ["ray:shoal", "ray:shoal#m", "ray://shoal#org/m"])
def test_an_address_is_its_canonical_text(text: str) -> None:
    address = parse_address(text)
    assert str(address) == f"ray://{text.removeprefix('ray:').removeprefix('//')}"
    assert parse_address(str(address)) == address


@pytest.mark.parametrize("text", ["ray:", "ray:#m", "ray:shoal#", "ray:a/b#m", "ray:shoal#../x"])
def test_a_bad_address_says_what_to_write(text: str) -> None:
    with pytest.raises(AddressError):
        parse_address(text)
