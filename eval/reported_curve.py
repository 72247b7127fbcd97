"""A step-cost curve for `dspark simulate` and `dspark tune` from reported verify times of one machine.

    python -m eval.reported_curve deepseek-v4-flash-b300 --draft-layers 3 -k 5 --json FILE

An entry of configs/reported whose points are plain steps in milliseconds by tokens says what a verify pass costs.
Assumed, and said in the curve's notes: a pass costs what its tokens cost, however many requests they belong to and
whatever their context; between the points straight lines, beyond the last the slope of the last two; drafting k tokens
costs a pass of requests x k tokens through so many layers of the target's own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dspark_runtime.configs import FOLDER, read_yaml
from dspark_runtime.errors import ConfigError
from dspark_runtime.tuning.curve import Curve, Point

REQUESTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


def reported_curve(name: str, draft_layers: int, k: int, command: str) -> Curve:
    """Raises ConfigError for an entry without such points."""
    import numpy as np

    from dspark_runtime.cost.facts import load_architecture, load_hardware

    path = FOLDER / "reported" / f"{name}.yaml"
    if not path.is_file():
        raise ConfigError(f"name: found {name!r}, allowed: an entry of configs/reported")
    entry = read_yaml(path)
    points = [p for p in entry["points"] if p["metric"] == "step_ms"]
    steps = {p["requests"] * p.get("tokens", 1): p["value"] for p in points}
    if len(steps) < 3 or 1 not in steps:
        raise ConfigError(f"{path.name}: points: found {len(steps)} steps, allowed: 3 or more, the first of 1 token")
    tokens, ms = (np.array(x, dtype=float) for x in zip(*sorted(steps.items())))
    slope = (ms[-1] - ms[-2]) / (tokens[-1] - tokens[-2])
    model, machine = load_architecture(entry["model"]), load_hardware(entry["hardware"])
    layers = model.ffn.moe.layers

    def verify(n: int) -> float:
        return float(np.interp(n, tokens, ms) + slope * max(0.0, n - tokens[-1]))

    points = [
        Point(num_requests=b, num_tokens=t, depth=t - 1, context_len=entry["context"], verify_ms=verify(b * t),
              draft_ms=verify(b * (t - 1)) * draft_layers / layers if t > 1 else 0, other_ms=0, spread=0)
        for b in REQUESTS for t in range(1, k + 2)
    ]  # fmt: skip
    gpus, source = entry["gpus"], entry["sources"][0]["source"]
    sizes, times = (", ".join(f"{x:g}" for x in values) for values in (tokens, ms))
    return Curve(
        command=command, source="model",
        environment={"machine": entry["hardware"], "gpu": f"{gpus} {machine.title}", "gpus": gpus},
        target=entry["model"], drafter=f"{draft_layers} layers", method="dspark", dtype="reported", weights="dummy",
        max_depth=k, can_tree=False, between="linear", repeats=1, points=points,
        notes=[
            f"reported: verify pass of {sizes} tokens in {times} ms ({source})",
            f"assumed: straight lines between, {1e3 * slope:.1f} us a token beyond; the same for every context and "
            "number of requests",
            f"assumed: drafting k tokens costs {draft_layers} of {layers} layers of a pass of requests x k tokens",
        ],
    )  # fmt: skip


def main(
    name: Annotated[str, typer.Argument(help="An entry of configs/reported.")],
    draft_layers: Annotated[int, typer.Option(help="Layers of the drafter, as wide as the target's.")],
    json_file: Annotated[Path, typer.Option("--json", help="Write the curve here.")],
    k: Annotated[int, typer.Option("-k", "--num-speculative-tokens", help="Longest chain.")] = 5,
) -> None:
    command = f"python -m eval.reported_curve {name} --draft-layers {draft_layers} -k {k} --json {json_file}"
    json_file.write_text(reported_curve(name, draft_layers, k, command).model_dump_json(indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
