"""The `recommend` section of plait.yaml: which ranking models are served, and how their deployments are sized.

What may change on a running deployment is in its `knobs` (Serve's `user_config`); everything else needs a restart.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from plait_disagg.queue.knobs import HnKnobs, WorkerKnobs
from plait_serving.cores import CoreBudget
from plait_serving.sections import MAX_REPLICAS, FolderPath, GpuShare, Name, Replicas, Replicated, Section
from plait_serving.starter.manifest import WEIGHTS

STARTER_RANKING_MODEL = "picks"
"""The model that ships with plait."""

STARTER_RANKING_FOLDER = WEIGHTS / "recommend" / STARTER_RANKING_MODEL

MAX_WORKERS = MAX_REPLICAS
"""Replicas of one kind of worker."""

MAX_SHARDS = 64

Mode = Literal["whole", "split"]
RankRole = Literal["whole", "cn", "hn", "shard"]
RankExecutor = Literal["auto", "torch"]
BetweenHosts = Literal["tcp", "nixl"]
OmpWait = Literal["default", "active", "passive"]


class NoKnobs(Section):
    """Nothing can change on a running shard."""


class _PartSection(Replicated):
    replicas: Annotated[int, Field(ge=1, le=MAX_WORKERS)] | Replicas = 1
    num_cpus: CoreBudget = None
    omp_wait: Annotated[
        OmpWait, Field(description="OpenMP workers between operations: spin (active), sleep (passive)")
    ] = "passive"
    """Lookups are few beside what OpenVINO's threads and the ingress compute meanwhile: spinning takes their cores."""


class ShardsSection(_PartSection):
    """Processes that hold the tables between them, where these are larger than a node; CNs then hold none. `replicas`
    are those of each shard: with a range, each follows its own load."""

    count: Annotated[int, Field(ge=2, le=MAX_SHARDS, description="shards of the tables")] = 2
    memory_gb: Annotated[
        float | None, Field(gt=0, description="GB (10^9 bytes) of tables in a shard, at most; unset: not bounded")
    ] = None

    @property
    def memory_bytes(self) -> int | None:
        """`memory_gb` in bytes."""
        return None if self.memory_gb is None else int(self.memory_gb * 1e9)


class CnSection(_PartSection):
    """The embedding half: processes with the tables, or with `shards` those that ask for them."""

    shards: Annotated[
        Annotated[int, Field(ge=2, le=MAX_SHARDS)] | ShardsSection | None,
        Field(description="into how many processes the tables are dealt; unset: each CN has all of them"),
    ] = None
    knobs: WorkerKnobs = WorkerKnobs()

    @property
    def shard_section(self) -> ShardsSection | None:
        """The section of the shards, if there are any."""
        return ShardsSection(count=self.shards) if isinstance(self.shards, int) else self.shards


class HnSection(_PartSection):
    """The dense half, or as `whole` both halves in one process."""

    num_gpus: GpuShare = None
    knobs: HnKnobs = HnKnobs()


class RankModelSection(Section):
    """One packaged model: a folder made by `plait models package`. `mode` decides which of its parts run."""

    folder: FolderPath
    mode: Mode = "split"
    executor: Annotated[
        RankExecutor, Field(description="what runs the dense half on a CPU; auto: openvino where it is faster")
    ] = "auto"
    between_hosts: Annotated[
        BetweenHosts, Field(description="how its processes reach each other on other machines; nixl: the extra `nixl`")
    ] = "tcp"
    cn: CnSection = CnSection()
    hn: HnSection = HnSection()
    whole: HnSection = HnSection()

    @property
    def parts(self) -> dict[str, CnSection | HnSection | ShardsSection]:
        """Its deployments by role, first the one that the ingress calls; each shard has its own (`shard0`, ...)."""
        if self.mode == "whole":
            return {"whole": self.whole}
        shards = self.cn.shard_section
        held = {} if shards is None else dict.fromkeys(map(shard_role, range(shards.count)), shards)
        return {"cn": self.cn, "hn": self.hn, **held}


def shard_role(number: int) -> str:
    """Return the name of a shard among the parts of a model."""
    return f"shard{number}"


class RankingSection(Section):
    """The ranking models, by the names that requests use."""

    models: Annotated[
        dict[Name, RankModelSection] | None, Field(description="unset: the starter model, if it is there")
    ] = None

    def resolved_models(self) -> dict[str, RankModelSection]:
        """Return the models by name; if none are given, those in the starter's folder."""
        if self.models is not None:
            return dict(self.models)
        if not (STARTER_RANKING_FOLDER / "package.json").is_file():
            return {}
        return {STARTER_RANKING_MODEL: RankModelSection(folder=STARTER_RANKING_FOLDER)}
