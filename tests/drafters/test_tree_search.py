"""The dynamic programme against every tree, and the shipped topologies against what they say of themselves."""

from __future__ import annotations

import pytest
import yaml

from drafters.topology import TreeSpec
from drafters.tree_search import best_tree, best_trees, expected_length, profile_of, smallest_tree, survival
from dspark_runtime.configs import FOLDER, load_tree

SHIPPED = sorted(p for p in (FOLDER / "trees").glob("*.yaml") if "profile" in yaml.safe_load(p.read_text()))


def every_tree(nodes: int, depth: int) -> list[TreeSpec]:
    found = [(-1,)]
    for _ in range(nodes - 1):
        found = [t + (p,) for t in found for p in range(max(t[-1], 0), len(t))]
    return [spec for spec in map(TreeSpec, found) if spec.depth <= depth]


@pytest.mark.parametrize("profile", [[0.5, 0.3, 0.1], [0.9, 0.05], [0.2, 0.5, 0.25], [0.34, 0.33, 0.33]])
@pytest.mark.parametrize("nodes, depth", [(1, 3), (4, 1), (6, 2), (7, 7), (7, 3)])
def test_no_tree_is_better(profile: list[float], nodes: int, depth: int) -> None:
    want = max(expected_length(spec, profile) for n in range(1, nodes + 1) for spec in every_tree(n, depth))
    spec = best_tree(profile, nodes, depth)
    assert expected_length(spec, profile) == pytest.approx(want) and spec.num_nodes <= nodes and spec.depth <= depth


@pytest.mark.parametrize("profiles", [[[0.9, 0.05], [0.3, 0.3, 0.3], [0.8]], [[0.2, 0.5], [0.9, 0.02]]])
def test_rates_that_change_with_depth(profiles: list[list[float]]) -> None:
    found = best_trees(profiles, 7)
    for nodes, spec in enumerate(found, start=1):
        want = max(sum(survival(s, profiles)) for n in range(1, nodes + 1) for s in every_tree(n, len(profiles)))
        assert sum(survival(spec, profiles)) == pytest.approx(want)
        assert spec.num_nodes <= nodes and spec.depth <= len(profiles)


def test_a_profile_has_the_chains_length() -> None:
    profile = profile_of(4.5, 7)
    assert expected_length(TreeSpec.chain(7), profile) == pytest.approx(4.5, abs=1e-4)
    assert sum(profile[1:]) == pytest.approx(0.75 * (1 - profile[0]), abs=1e-4) and len(profile) == 16


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_shipped_topologies_are_what_they_say(path) -> None:
    values, spec = yaml.safe_load(path.read_text()), load_tree(str(path))
    profile, said = values["profile"], values["expected_acceptance_length"]
    assert expected_length(spec, profile) == pytest.approx(said, abs=6e-4)
    smallest = smallest_tree(profile, 6.0, 7)
    if path.stem.endswith("al6"):
        assert said >= 6 and spec.num_nodes == smallest.num_nodes
    else:
        assert smallest is None and said == pytest.approx(expected_length(best_tree(profile, 64, 7), profile), abs=6e-4)


def test_all_domains_are_shipped() -> None:
    assert {p.stem.split("-")[0] for p in SHIPPED} == {"math", "code", "chat"}
