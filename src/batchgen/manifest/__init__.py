"""Prompt manifests: every row is checked before a model is touched, then becomes frozen jobs."""

from batchgen.manifest.making import jobs
from batchgen.manifest.notices import Notice
from batchgen.manifest.options import DEFAULT_NAME, JobDefaults, ManifestOptions
from batchgen.manifest.survey import ManifestSummary, ShapeCount, SkippedRow, check, survey

__all__ = [
    "DEFAULT_NAME", "JobDefaults", "ManifestOptions", "ManifestSummary", "Notice", "ShapeCount", "SkippedRow",
    "check", "jobs", "survey",
]
