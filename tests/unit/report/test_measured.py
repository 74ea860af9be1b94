"""What runs measured adds up over the resumes of one folder."""

from __future__ import annotations

from batchgen.events import ComponentLoaded, StageBatchDone
from batchgen.inventory.records import DeviceFacts
from batchgen.plan.records import Plan
from batchgen.plan.trail import Trail
from batchgen.report.measured import add_measured, read_measured
from batchgen.report.summary import Summary
from batchgen.runfolder import RunFolder

PLAN = Plan("auto", "cpu", (DeviceFacts("CPU", "cpu", 1, 1),), False, False, 1, 45.0, "task", (), None, Trail())


def one_run(batch):
    summary = Summary()
    summary.listen(ComponentLoaded(0, "vae", "resident", 100, 0.5))
    summary.listen(StageBatchDone(0, 0, "decode", "64x64", tuple("abcdefgh"[:batch]), batch, 2.0, (("vae", 1, 1.5),)))
    return summary


def test_sums_add_and_peaks_do_not(tmp_path):
    folder = RunFolder(tmp_path)
    folder.prepare()
    assert read_measured(folder) == {}
    add_measured(folder, PLAN, one_run(8))
    add_measured(folder, PLAN, one_run(3))
    found = read_measured(folder)
    stage, part = found["stages"]["decode"], found["components"]["vae"]
    assert (stage["batches"], stage["jobs"], stage["seconds"], stage["largest_batch"]) == (2, 11, 4.0, 8)
    assert (part["loads"], part["loaded_bytes"], part["calls"], part["placement"]) == (2, 200, 2, "resident")


def test_a_damaged_file_counts_as_none(tmp_path):
    folder = RunFolder(tmp_path)
    folder.prepare()
    (folder.tables / "measured.json").write_text("{half")
    add_measured(folder, PLAN, one_run(1))
    assert read_measured(folder)["stages"]["decode"]["jobs"] == 1
