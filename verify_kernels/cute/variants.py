"""Kernel variants: the constants that a compiled kernel was made with. `family` is the folder of its sources."""

from __future__ import annotations

import dataclasses
from typing import ClassVar


@dataclasses.dataclass(frozen=True)
class Variant:
    """A compiled kernel's constants; see `attention.verify.VerifyAttention`."""

    family: ClassVar = "attention"
    dtype: str  # "bfloat16" or "float16"
    head_dim: int
    heads: int
    kv_heads: int
    page_size: int
    mask: str
    rows: int
    blocks: int = 1
    tile_n: int = 64
    stages: int = 4
    softcap: bool = False
    fp8: bool = False  # keys and values in e4m3

    @property
    def name(self) -> str:
        cap = ("_cap" if self.softcap else "") + ("_e4m3" if self.fp8 else "")
        return (
            f"verify_{self.dtype}_d{self.head_dim}_h{self.heads}_{self.kv_heads}_p{self.page_size}_{self.mask}"
            f"_m{self.rows}x{self.blocks}_n{self.tile_n}_s{self.stages}{cap}"
        )


@dataclasses.dataclass(frozen=True)
class PlanVariant:
    """Constants of the schedule kernel; see `attention.schedule.schedule`."""

    family: ClassVar = "attention"
    group: int
    kv_heads: int
    block_rows: int
    tile_n: int
    causal: bool
    setup: int

    @property
    def name(self) -> str:
        order = "causal" if self.causal else "any"
        return f"plan_g{self.group}_h{self.kv_heads}_m{self.block_rows}_n{self.tile_n}_{order}_c{self.setup}"


@dataclasses.dataclass(frozen=True)
class AppendVariant:
    """Constants of the cache's write side; see `attention.append.AppendKV`."""

    family: ClassVar = "attention"
    dtype: str
    head_dim: int
    heads: int
    kv_heads: int
    norm: bool
    fp8: bool = False  # keys and values in e4m3

    @property
    def name(self) -> str:
        ends = ("_norm" if self.norm else "") + ("_e4m3" if self.fp8 else "")
        return f"append_{self.dtype}_d{self.head_dim}_h{self.heads}_{self.kv_heads}{ends}"


@dataclasses.dataclass(frozen=True)
class CommitVariant:
    """Constants of the accepted path's compaction; see `attention.commit.CommitPath`."""

    family: ClassVar = "attention"
    words: int
    values: bool = True  # beside the keys; latents have none

    @property
    def name(self) -> str:
        return f"commit_w{self.words}" + ("" if self.values else "_keys")


@dataclasses.dataclass(frozen=True)
class LinearVariant:
    """Constants of the small-T linear; see `linear.kernel.Linear`.

    tokens: columns of the product, 8, 16, 32 or 64, of which a call may use fewer; rows, tile_k: the tile of weights
    that a stage holds; rms_in, rms_out: the norm before and the norm after; kind: of weights, "plain" for 16 bits,
    "fp8" as `linear.pack` has them.
    """

    family: ClassVar = "linear"
    dtype: str
    tokens: int
    rows: int
    tile_k: int
    stages: int
    bias: bool = False
    residual: bool = False
    swiglu: bool = False
    rms_in: bool = False
    rms_out: bool = False
    kind: str = "plain"
    pdl: bool = True

    @property
    def name(self) -> str:
        flags = {
            "bias": self.bias, "res": self.residual, "swiglu": self.swiglu, "rmsin": self.rms_in, "rmsout": self.rms_out,
            self.kind: self.kind != "plain", "nopdl": not self.pdl,
        }  # fmt: skip
        ends = "".join(f"_{name}" for name, on in flags.items() if on)
        return f"linear_{self.dtype}_t{self.tokens}_m{self.rows}_k{self.tile_k}_s{self.stages}{ends}"


@dataclasses.dataclass(frozen=True)
class ExpertsVariant:
    """Constants of the grouped products of a mixture of experts; see `moe.kernel.Experts`.

    tokens: columns, 8, 16, 32 or 64, of which a call may use fewer; top_k of experts; down: the second product; kind:
    of weights, "plain" for 16 bits, "fp8" or "mxfp4" as `moe.pack` has them; situ: beta and linear beta of SiTU-GLU in
    place of SwiGLU, in the first product.
    """

    family: ClassVar = "moe"
    dtype: str
    tokens: int
    experts: int
    top_k: int
    stages: int
    down: bool
    kind: str = "plain"
    situ: tuple[float, float] | None = None
    pdl: bool = True

    @property
    def name(self) -> str:
        ends = ("_down" if self.down else "_gate_up") + ("" if self.pdl else "_nopdl")
        ends += "_situ%g_%g" % self.situ if self.situ else ""
        return f"experts_{self.dtype}_{self.kind}_t{self.tokens}_e{self.experts}_k{self.top_k}_s{self.stages}{ends}"


@dataclasses.dataclass(frozen=True)
class RouteVariant:
    """Constants of the choice of experts; see `moe.route.Route`. dtype: of the logits, also "float32"."""

    family: ClassVar = "moe"
    dtype: str
    experts: int
    top_k: int
    renormalize: bool
    scores: str = "softmax"
    bias: bool = False
    groups: int = 1
    top_groups: int = 1

    @property
    def name(self) -> str:
        ends = ("_bias" if self.bias else "") + ("_sum1" if self.renormalize else "")
        return f"route_{self.dtype}_{self.scores}_e{self.experts}_k{self.top_k}_g{self.top_groups}of{self.groups}{ends}"


LATENT_RANK, LATENT_WIDTH = 512, 576  # channels of a latent that are values, and with the key's own ones


@dataclasses.dataclass(frozen=True)
class LatentVariant:
    """Constants of verify attention over latents; see `latent.verify.LatentAttention`.

    The properties are what `attention.run.plan` makes its schedule for.
    """

    family: ClassVar = "latent"
    kv_heads: ClassVar = 1
    head_dim: ClassVar = LATENT_RANK
    rows: ClassVar = 64
    dtype: str
    heads: int
    page_size: int
    mask: str
    blocks: int = 1
    run: int = 2

    @property
    def tile_n(self) -> int:
        """Keys that the schedule keeps together."""
        return 64 * self.run

    @property
    def name(self) -> str:
        return f"latent_{self.dtype}_h{self.heads}_p{self.page_size}_{self.mask}_m64x{self.blocks}_r{self.run}"


@dataclasses.dataclass(frozen=True)
class KdaVerifyVariant:
    """Constants of delta attention over new tokens; see `recurrence.verify.KdaVerify`."""

    family: ClassVar = "recurrence"
    dtype: str
    nodes: int
    columns: int
    tree: bool

    @property
    def name(self) -> str:
        shape = "tree" if self.tree else "chain"
        return f"kda_verify_{self.dtype}_{shape}{self.nodes}_c{self.columns}"


@dataclasses.dataclass(frozen=True)
class KdaCommitVariant:
    """Constants of the commit of all layers' states; see `recurrence.commit.KdaCommit`."""

    family: ClassVar = "recurrence"
    dtype: str
    nodes: int

    @property
    def name(self) -> str:
        return f"kda_commit_{self.dtype}_n{self.nodes}"


@dataclasses.dataclass(frozen=True)
class GatedNormVariant:
    """Constants of the gated norm of delta attention's outputs; see `recurrence.norm.GatedNorm`."""

    family: ClassVar = "recurrence"
    dtype: str

    @property
    def name(self) -> str:
        return f"gated_norm_{self.dtype}"


AnyVariant = (
    Variant | PlanVariant | AppendVariant | CommitVariant | LinearVariant | ExpertsVariant | RouteVariant
    | LatentVariant | KdaVerifyVariant | KdaCommitVariant | GatedNormVariant
)
