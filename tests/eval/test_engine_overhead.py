"""The engine without a model: what its overhead benchmark times is a whole run with every draft accepted."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from drafters.topology import TreeSpec
from eval.engine_overhead import null_model, step_ms


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("spec", [TreeSpec.chain(0), TreeSpec.chain(3), TreeSpec((-1, 0, 0, 1))], ids=str)
def test_every_step_is_timed_in_phases(spec: TreeSpec, temperature: float) -> None:
    model = null_model(SimpleNamespace(vocab_size=11))
    ms = step_ms(model, spec, requests=2, steps=3, temperature=temperature)
    assert set(ms) == {"draft", "verify", "accept", "other", "total"}
    assert all(len(times) == 3 for times in ms.values())
    for phases in zip(*(ms[k] for k in ("draft", "verify", "accept", "other", "total"))):
        assert sum(phases[:4]) == pytest.approx(phases[4])
