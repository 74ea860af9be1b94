"""A plan as the JSON object of `plan --json` and run.json. Its schema is plan.schema.json beside this file."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from batchgen.plan.records import Plan

SCHEMA_FILE = Path(__file__).with_name("plan.schema.json")


def plan_object(plan: Plan) -> dict[str, Any]:
    """Plain values only. Sizes in bytes, `_gb` in GiB; `threshold.gb` null means never, `batch_size` "auto" that stages choose."""
    return {
        "schema": 1,
        "model": plan.model,
        "profile": plan.profile,
        "performance_mode": plan.performance_mode,
        "platform": plan.platform,
        "devices": [
            {"name": device.name, "total_gb": device.total_gb, "available_gb": device.available_gb} for device in plan.devices
        ],
        "fsdp": plan.fsdp,
        "cfg_parallel": plan.cfg_parallel,
        "replicas": plan.replicas,
        "group_size": plan.group_size,
        "threshold": {"gb": plan.threshold_gb, "source": plan.threshold_source},
        "placements": {
            placement.component: {
                "mode": placement.mode, "group": placement.group, "by": placement.by, "reason": placement.reason,
                "bytes": placement.bytes,
            }
            for placement in plan.placements
        },
        "stages": [{**asdict(stage), "components": list(stage.components)} for stage in plan.stages],
        "batch_size": plan.batch_size if plan.batch_size is not None else "auto",
        "predicted": asdict(plan.predicted) if plan.stages else {},
        "scaling": [asdict(point) for point in plan.scaling],
        "trail": [
            {
                "rule": decision.rule, "subject": decision.subject, "decision": decision.decision,
                "numbers": dict(decision.numbers), "text": decision.text,
            }
            for decision in plan.trail
        ],
    }  # fmt: skip
