"""What the plugin decides before vLLM is involved; always run."""

from __future__ import annotations

import logging
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from dspark_runtime import vllm as plugin
from dspark_runtime.errors import ConfigError
from dspark_runtime.vllm.proposer import NgramProposer, SuffixProposer


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A vLLM of no more than what `register` may touch."""
    calls: list[tuple[str, str]] = []
    module, logger = ModuleType("vllm"), ModuleType("vllm.logger")
    module.ModelRegistry = SimpleNamespace(register_model=lambda *what: calls.append(what))
    module.__version__ = "0.33.0"
    logger.init_logger = logging.getLogger
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setitem(sys.modules, "vllm.logger", logger)
    monkeypatch.delenv(plugin.SWITCH, raising=False)
    # Registered for removal: `register` sets it itself.
    monkeypatch.setenv(plugin._WARNED, "")
    yield SimpleNamespace(module=module, calls=calls)


def test_registers_and_may_run_again(host: SimpleNamespace) -> None:
    plugin.register()
    plugin.register()
    assert host.calls == [("Qwen3DSparkModel", "dspark_runtime.vllm.model:DSparkForCausalLM")] * 2


@pytest.mark.parametrize("version", ["0.32.0", "0.34.0", "1.33.0", "0.3.33", "0.330.0"])
def test_another_version_warns_once_and_changes_nothing(
    host: SimpleNamespace, version: str, caplog: pytest.LogCaptureFixture
) -> None:
    host.module.__version__ = version
    for _ in range(3):
        plugin.register()
    assert host.calls == [] and len(caplog.records) == 1
    assert caplog.records[0].getMessage() == (
        f"dspark-runtime is not plugged in: found vLLM {version}, supported: 0.33.x; vLLM's own DSpark runs"
    )


@pytest.mark.parametrize("version", ["0.33.0", "0.33.1", "0.33.0+cpu", "0.33.0rc1"])
def test_supported_versions(version: str) -> None:
    assert plugin.supports(version)


def test_the_switch(host: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugin.SWITCH, "0")
    plugin.register()
    assert host.calls == []
    monkeypatch.setenv(plugin.SWITCH, "off")
    with pytest.raises(ConfigError, match="^DSPARK_VLLM_PLUGIN: found 'off', allowed: 0, 1$"):
        plugin.register()
    monkeypatch.setenv(plugin.SWITCH, "1")
    plugin.register()
    assert len(host.calls) == 1


def test_the_entry_point_is_declared_under_its_name() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["vllm.general_plugins"] == {plugin.NAME: "dspark_runtime.vllm:register"}
    assert project["optional-dependencies"]["vllm"] == [f"vllm=={plugin.SUPPORTED}.*"]


def test_the_plugin_is_light() -> None:
    code = (
        "import sys, dspark_runtime.vllm\n"
        "found = {'torch', 'vllm', 'pydantic', 'drafters', 'verify_kernels'} & set(sys.modules)\n"
        "assert not found, found"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_doctor_says_what_is_plugged_and_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def drafter() -> str:
        return dict(plugin.status())["  drafter"]

    monkeypatch.delenv(plugin.SWITCH, raising=False)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.setattr(plugin, "_installed", lambda: None)
    assert plugin.status() == [("vLLM", "not installed (extra: vllm); nothing to plug into")]
    monkeypatch.setattr(plugin, "_installed", lambda: "0.33.0")
    monkeypatch.setattr(plugin.metadata, "entry_points", lambda **_: ["found"])
    assert drafter() == "plugged: Qwen3DSparkModel is dspark_runtime.vllm.model:DSparkForCausalLM"
    lines = dict(plugin.status())
    assert lines["  attention"].startswith("not built yet") and lines["  linear, MoE"].startswith("not built yet")
    monkeypatch.setattr(plugin.metadata, "entry_points", lambda **_: [])
    assert drafter().startswith("not plugged: this package is not installed")
    monkeypatch.setenv("VLLM_PLUGINS", "lora,other")
    assert drafter().startswith("not plugged: VLLM_PLUGINS='lora,other' does not name dspark")
    monkeypatch.setenv(plugin.SWITCH, "0")
    assert drafter().startswith("not plugged: DSPARK_VLLM_PLUGIN=0")
    monkeypatch.setattr(plugin, "_installed", lambda: "0.32.0")
    assert drafter() == "not plugged: supported is vLLM 0.33.x; vLLM's own DSpark runs"


def looked_up(tokens: list[int], drafts: int, longest: int, shortest: int) -> list[int]:
    """By trying every place: the longest match wins, then the latest; what follows it, up to the end."""
    best: list[int] = []
    for length in range(shortest, longest + 1):
        for at in range(length, len(tokens)):
            if len(tokens) > length and tokens[at - length : at] == tokens[-length:]:
                best = tokens[at : at + drafts]
    return best


@pytest.mark.parametrize("kind", [NgramProposer, SuffixProposer])
def test_prompt_lookup_is_the_longest_latest_match(kind: type[NgramProposer]) -> None:
    g = np.random.default_rng(0)
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=5), model_config=SimpleNamespace(max_model_len=64)
    )
    proposer = kind(config)
    proposer.load_model(object())
    lengths = np.array([64, 63, 61, 40, 1, 2, 30, 17])
    ids = g.integers(0, 3, (8, 64)).astype(np.int32)
    ids[6, :30] = np.tile(np.arange(10), 3)
    before = ids.copy()
    sampled = [[1], [1, 2], [1], [1], [1], [1], [1], []]  # the last one's prompt is still being read
    found = proposer.propose(sampled, lengths, ids, slot_mappings=None)
    for row, (n, tokens) in enumerate(zip(lengths, ids.tolist())):
        room = min(64 - n, 5) if sampled[row] else 0
        assert found[row] == looked_up(tokens[:n], 5, kind.longest, kind.shortest)[:room]
    assert found[6] == [0, 1, 2, 3, 4] and (ids == before).all()
    assert proposer.propose([[], []], lengths[:2], ids) == [[], []]
