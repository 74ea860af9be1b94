"""The rules of residency where the shared table of cases says nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from making import GIB, facts

from batchgen.errors import UsageError
from batchgen.inventory.profiles import named_profile
from batchgen.plan.planner import make_plan
from batchgen.plan.records import PlanFacts

RESIDENT, OFFLOAD, STREAM, FSDP = "resident", "component-offload", "layerwise-offload", "fsdp"
LTX = ("text_encoder", "connectors", "transformer", "vae", "audio_vae", "vocoder")


def adapted(given: PlanFacts, *components: str) -> PlanFacts:
    return replace(given, adapted=components)


ROWS: list[tuple[str, PlanFacts, dict[str, str]]] = [
    ("a CPU flag negated keeps even the layerwise default off", facts("qwen-image", 24, text_encoder_cpu_offload=False),
     {"text_encoder": RESIDENT, "vae": STREAM}),
    ("the layerwise selector beats the CPU flag",
     facts("qwen-image", 80, layerwise_offload_components="text_encoder", text_encoder_cpu_offload=True), {"text_encoder": STREAM}),
    ("the dit's layerwise flag beats the CPU selector",
     facts("qwen-image", 80, dit_layerwise_offload=True, cpu_offload_components="all"), {"transformer": STREAM, "vae": OFFLOAD}),
    ("the CPU flag beats --no-dit-layerwise-offload", facts("qwen-image", 80, dit_layerwise_offload=False, dit_cpu_offload=True),
     {"transformer": OFFLOAD}),
    ("--no-dit-layerwise-offload keeps the dit and its helpers", facts("ltx-2", 24, dit_layerwise_offload=False),
     {"transformer": RESIDENT, "connectors": RESIDENT, "text_encoder": STREAM, "vae": STREAM}),
    ("the dit's CPU flag takes its helpers", facts("ltx-2", 80, dit_cpu_offload=True), {"transformer": OFFLOAD, "connectors": OFFLOAD}),
    ("memory mode offloads helpers of a sharded dit", facts("ltx-2", 80, 80, performance_mode="memory", fsdp=True),
     {"transformer": FSDP, "connectors": OFFLOAD, "vocoder": OFFLOAD}),
    ("explicit sharding keeps helpers on the device", facts("ltx-2", 24, 24, fsdp=True), {"transformer": FSDP, "connectors": RESIDENT}),
    ("only the dits that are not offloaded are sharded",
     facts("wan2.2-a14b", 80, 80, fsdp=True, component_residency="transformer_2=component-offload"),
     {"transformer": FSDP, "transformer_2": OFFLOAD}),
    ("manual mode shards when asked", facts("qwen-image", 80, 80, performance_mode="manual", fsdp=True), {"transformer": FSDP, "vae": RESIDENT}),
    ("speed mode shards where the profile opts in, without headroom", facts("z-image", 12, 12, performance_mode="speed"),
     {"transformer": FSDP, "text_encoder": RESIDENT}),
    ("speed mode does not shard what fits twice",
     facts("z-image", 80, 80, performance_mode="speed", sizes={"transformer": 12 * GIB, "text_encoder": 8 * GIB, "vae": GIB}),
     {"transformer": RESIDENT}),
    ("adapters on the dit keep automatic sharding off", adapted(facts("z-image", 12, 12, performance_mode="speed"), "transformer"),
     {"transformer": RESIDENT}),
    ("adapters on the text encoder do not", adapted(facts("z-image", 12, 12, performance_mode="speed"), "text_encoder"), {"transformer": FSDP}),
    ("nor do they when it is asked for", adapted(facts("qwen-image", 80, 80, fsdp=True), "text_encoder"), {"transformer": FSDP}),
    ("nor those on a dit that is not sharded",
     adapted(facts("wan2.2-a14b", 80, 80, fsdp=True, component_residency="transformer_2=component-offload"), "transformer_2"),
     {"transformer": FSDP}),
    ("an explicit dit keeps automatic sharding off", facts("z-image", 80, 80, component_residency="transformer=resident"),
     {"transformer": RESIDENT}),
    ("an explicit helper does not", facts(replace(named_profile("z-image").profile), 80, 80, names=(*LTX,), component_residency="connectors=resident"),
     {"transformer": FSDP, "connectors": RESIDENT}),
    ("unset helpers of an automatically sharded dit stay", facts("z-image", 80, 80, names=LTX), {"transformer": FSDP, "connectors": RESIDENT}),
    ("the CPU shards when asked", facts("qwen-image", 16, 16, platform="cpu", fsdp=True), {"transformer": FSDP, "vae": RESIDENT}),
    ("memory mode on the CPU takes no automatic step", facts("qwen-image", 16, platform="cpu", performance_mode="memory"),
     {"transformer": RESIDENT, "text_encoder": RESIDENT}),
    ("speed mode on the CPU does not shard", facts("z-image", 16, 16, platform="cpu", performance_mode="speed"), {"transformer": RESIDENT}),
    ("memory mode with streaming off still leaves nothing", facts("qwen-image", 80, performance_mode="memory", layerwise_offload_components="none"),
     {"transformer": OFFLOAD, "text_encoder": OFFLOAD, "vae": OFFLOAD}),
    ("choosing what streams keeps what the profile keeps above the threshold", facts("qwen-image", 80, layerwise_offload_components="dit"),
     {"transformer": STREAM, "text_encoder": OFFLOAD, "vae": RESIDENT}),
    ("choosing what streams leaves no vae that would have streamed", facts("wan2.1-t2v-14b", 80, dit_layerwise_offload=True),
     {"transformer": STREAM, "text_encoder": OFFLOAD, "vae": OFFLOAD}),
    ("choosing what streams leaves no image encoder that would have streamed",
     facts("qwen-image", 48, names=["image_encoder", "transformer", "vae"], layerwise_offload_components="dit"),
     {"transformer": STREAM, "image_encoder": OFFLOAD, "vae": RESIDENT}),
    ("none leaves an image encoder where base offload does", facts("qwen-image", 48, names=["image_encoder"], layerwise_offload_components="none"),
     {"image_encoder": RESIDENT}),
    ("a part that no group knows is resident", facts("qwen-image", 24, names=["transformer", "brand_new_part"]),
     {"brand_new_part": RESIDENT, "transformer": OFFLOAD}),
    ("a condition image encoder streams with the vaes", facts("qwen-image", 24, names=["transformer", "condition_image_encoder"]),
     {"condition_image_encoder": STREAM}),
    ("one explicit dit keeps the others from streaming by themselves", facts("wan2.2-a14b", 80, component_residency="transformer=resident"),
     {"transformer": RESIDENT, "transformer_2": OFFLOAD}),
    ("everything unset comes back twice over, the explicit stays",
     facts("qwen-image", 80, sizes={"transformer": 20 * GIB, "text_encoder": 10 * GIB, "vae": GIB, "extra": GIB}, vae_cpu_offload=True),
     {"transformer": RESIDENT, "text_encoder": RESIDENT, "vae": OFFLOAD}),
    ("an empty list is as if it were not given", facts("qwen-image", 24, cpu_offload_components=" , ", dit_cpu_offload=False),
     {"transformer": RESIDENT, "vae": STREAM}),
    ("an empty layerwise list leaves the defaults on", facts("qwen-image", 24, layerwise_offload_components=""), {"vae": STREAM}),
    ("no dit at all", facts("qwen-image", 24, 24, names=["text_encoder", "vae"], fsdp=True), {"text_encoder": STREAM}),
]  # fmt: skip


@pytest.mark.parametrize(("made", "expected"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_placements(made: PlanFacts, expected: dict[str, str]) -> None:
    modes = make_plan(made).modes
    assert {name: modes[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (facts("qwen-image", 80, performance_mode="memmory"), ["--performance-mode", "'memory'"]),
        (facts("qwen-image", 80, fsdp=True), ["--fsdp", "two devices", "1 is selected"]),
        (facts("qwen-image", 80, cpu_offload_components="vae", vae_cpu_offload=False, dit_cpu_offload=True),
         ["--cpu-offload-components", "--dit-cpu-offload", "--no-vae-cpu-offload"]),
        (facts("qwen-image", 16, platform="mps", text_encoder_cpu_offload=True), ["--text-encoder-cpu-offload", "memory"]),
        (facts("qwen-image", 16, platform="mps", component_residency="vae=component-offload"), ["--component-residency", "memory"]),
        (facts("qwen-image", 16, platform="mps", cpu_offload_components="vae"), ["--cpu-offload-components", "memory"]),
        (facts("qwen-image", 16, platform="mps", dit_layerwise_offload=True), ["--dit-layerwise-offload", "memory"]),
        (facts("qwen-image", 16, platform="mps", fsdp=True), ["--fsdp", "memory"]),
        (adapted(facts("qwen-image", 80, 80, fsdp=True), "transformer"), ["--fsdp", "--lora", "transformer"]),
        (adapted(facts("qwen-image", 16, 16, platform="cpu", fsdp=True, performance_mode="manual"), "transformer"), ["--fsdp", "--lora"]),
        (facts("qwen-image", 80, keep_resident_min_available_gb=-1.0), ["--keep-resident-min-available-gb", "-1.0"]),
        (facts("qwen-image", 80, keep_resident_min_available_gb=float("nan")), ["--keep-resident-min-available-gb", "never"]),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_the_option_and_the_reason(made: PlanFacts, words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        make_plan(made)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert caught.value.option in words[0]


@pytest.mark.parametrize(
    "made",
    [facts("qwen-image", 16, platform="mps", cpu_offload_components="none"), facts("qwen-image", 16, platform="mps", vae_cpu_offload=False),
     facts("qwen-image", 16, platform="mps", layerwise_offload_components="none"), facts("qwen-image", 16, platform="mps", fsdp=False)],
)  # fmt: skip
def test_mps_takes_what_asks_for_no_move(made: PlanFacts) -> None:
    assert set(make_plan(made).modes.values()) == {RESIDENT}


@pytest.mark.parametrize(
    ("made", "replicas", "fsdp"),
    [
        (facts("qwen-image", 80), 1, False),
        (facts("qwen-image", 80, 80, 80), 3, False),
        (facts("z-image", 80, 80), 1, True),
        (facts("qwen-image", 16, 16, platform="cpu"), 2, False),
    ],
)
def test_devices_that_do_not_shard_are_replicas_and_the_trail_says_so(made: PlanFacts, replicas: int, fsdp: bool) -> None:
    plan = make_plan(made)
    assert (plan.replicas, plan.fsdp, plan.cfg_parallel) == (replicas, fsdp, False)
    assert [d.decision for d in plan.trail if d.rule == "replicas"] == [str(replicas)]
    assert [d.decision for d in plan.trail if d.rule == "cfg-parallel"] == ["no"]


def test_a_sharded_dit_with_guidance_runs_its_branches_in_parallel_only_when_asked_and_says_so() -> None:
    plan = make_plan(facts("z-image", 80, 80))
    assert "only --cfg-parallel asks for it" in next(d.text for d in plan.trail if d.rule == "cfg-parallel")
    asked = make_plan(facts("z-image", 80, 80, cfg_parallel=True))
    assert (asked.cfg_parallel, asked.group_size, asked.groups) == (True, 2, (("cuda:0", "cuda:1"),))


NOT_ALLOWED = replace(named_profile("qwen-image").profile, supports_cfg_parallel=False)
REFUSED_BRANCHES = {
    "nothing is sharded": (facts("qwen-image", 48, 48, cfg_parallel=True), "needs a sharded dit"),
    "the model has one branch": (facts("z-image-turbo", 80, 80, fsdp=True, cfg_parallel=True), "uses no guidance"),
    "the profile does not allow it": (facts(NOT_ALLOWED, 80, 80, fsdp=True, cfg_parallel=True), "does not allow it"),
    "three devices have no halves": (facts("qwen-image", 80, 80, 80, fsdp=True, cfg_parallel=True), "group of 3 has no halves"),
    "a group of three has no halves": (
        facts("qwen-image", *[80] * 6, fsdp=True, cfg_parallel=True, group_size=3), "group of 3 has no halves",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("made", "reason"), REFUSED_BRANCHES.values(), ids=REFUSED_BRANCHES)
def test_cfg_parallel_that_cannot_be_is_refused_with_the_reason(made: PlanFacts, reason: str) -> None:
    with pytest.raises(UsageError, match=reason) as caught:
        make_plan(made)
    assert (caught.value.exit_code, caught.value.option) == (2, "--cfg-parallel")


GROUPS = {
    "all devices, where nothing is said": ({}, None, 8, 1, 8),
    "groups of the size asked for": ({"group_size": 2}, None, 8, 4, 2),
    "devices over are left out": ({"group_size": 3}, None, 8, 2, 3),
    "no group beyond one machine": ({}, 4, 8, 2, 4),
}


@pytest.mark.parametrize(("asked", "on_one", "count", "groups", "size"), GROUPS.values(), ids=GROUPS)
def test_groups_by_the_rules(asked: dict[str, int], on_one: int | None, count: int, groups: int, size: int) -> None:
    plan = make_plan(replace(facts("qwen-image", *[48] * count, fsdp=True, **asked), largest_group=on_one))
    assert (plan.replicas, plan.group_size) == (groups, size)
    names = [name for group in plan.groups for name in group]
    assert names == [f"cuda:{number}" for number in range(groups * size)]


def test_group_sizes_that_cannot_be_are_refused() -> None:
    with pytest.raises(UsageError, match="4 devices are selected"):
        make_plan(facts("qwen-image", *[48] * 4, fsdp=True, group_size=5))
    with pytest.raises(UsageError, match="2 devices are on one machine"):
        make_plan(replace(facts("qwen-image", *[48] * 4, fsdp=True, group_size=3), largest_group=2))
    with pytest.raises(UsageError, match="nothing is sharded"):
        make_plan(facts("qwen-image", *[48] * 4, group_size=2))
    with pytest.raises(UsageError, match="1 is on each machine"):
        make_plan(replace(facts("qwen-image", *[48] * 4, fsdp=True), largest_group=1))


@pytest.mark.parametrize(
    ("made", "name", "by"),
    [
        (facts("qwen-image", 24, dit_cpu_offload=True), "transformer", "user"),
        (facts("qwen-image", 24), "transformer", "task"),
        (facts("qwen-image", 24), "text_encoder", "default"),
        (facts("z-image", 32), "transformer", "model"),
        (facts("hunyuan-video", 80), "vae", "global"),
        (facts("hunyuan-video", 80), "transformer", "default"),
        (facts("qwen-image", 24, keep_resident_min_available_gb=12.0), "vae", "user"),
        (facts("wan2.2-a14b", 80), "transformer_2", "model"),
        (facts("z-image", 80, 80), "transformer", "model"),
        (facts("qwen-image", 80, 80, fsdp=True), "transformer", "user"),
        (facts("qwen-image", 80, sizes={"transformer": GIB, "vae": GIB}), "transformer", "task"),
        (facts("qwen-image", 24, sizes={"transformer": GIB, "vae": GIB}), "transformer", "size"),
    ],
)
def test_who_decided(made: PlanFacts, name: str, by: str) -> None:
    assert make_plan(made).placement(name).by == by


def test_the_profile_s_prefetch_reaches_the_plan() -> None:
    profile = replace(named_profile("wan2.2-a14b").profile, dit_offload_prefetch_size=3)
    assert make_plan(facts(profile, 80)).prefetch == 3
    assert make_plan(facts("qwen-image", 80)).prefetch == 2


def test_an_option_that_binds_nothing_is_said() -> None:
    trail = make_plan(facts("qwen-image", 80, image_encoder_cpu_offload=True)).trail
    assert [d.subject for d in trail if d.decision == "binds nothing"] == ["--image-encoder-cpu-offload"]
