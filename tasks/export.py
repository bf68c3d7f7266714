"""The trained model as a plain Hugging Face folder: a weight version that is kept on a disk, and pinned."""

import json

from headrace.blocks.weights import WeightManifest
from headrace.engines.experience.files import Files
from headrace.tasks.campaign import current
from headrace.tasks.recovery import SyncMismatch, tidy_versions, version_path
from headrace.tasks.retention import versions
from headrace.tasks.stage import stage


@stage("export", "export")
async def export() -> str:
    """Keeps the current version below the campaign's folder and pins it; returns the path of its folder.

    A version that is there already, from an earlier attempt or because weights travel through the store, is taken as it
    is. Raises SyncMismatch when it is not what the rollout engines were verified to serve.
    """
    c = current()
    await c.engines.sync_all()
    files = Files(str(c.folder))
    kept = versions(files)
    served = json.loads(c.store.get(version_path(c.version)))
    if c.version not in kept.complete():
        publish = {
            "version": c.version,
            "step": c.version,
            "transport": "store",
            "address": kept.path(c.version),
            "store": files.url,
            "partition_bytes": served["partition_bytes"],
            "deadline_s": c.recipe.deadlines.sync,
        }
        await c.engines.call("actor", 0, "publish", publish, job_id=f"export-{c.version}-{c.attempt}")
    made = WeightManifest.model_validate_json(files.get(f"{kept.path(c.version)}/{kept.marker}"))
    # Engines with GPUs hash their partitions in another way; those with FP8 layers serve other bytes.
    same = made.hashing == served["hashing"] and not served["quantization"]
    if same and made.digest != served["digest"]:
        raise SyncMismatch(
            f"the exported version {c.version} in {files.url}/{kept.path(c.version)} has digest {made.digest}, but the "
            f"rollout engines serve that version with digest {served['digest']}. Look at the actor's log, "
            "delete that folder and run the campaign again"
        )
    kept.pin(c.version)
    await tidy_versions(c, kept)
    return f"{files.url}/{kept.path(c.version)}"
