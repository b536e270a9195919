"""What rankers and their workers count, for `/metrics`."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import Metric

from plait_serving.replica_metrics import family

_SAID = {
    "answered_bytes_total": "Bytes of rows that a shard answered",
    "asked_total": "Batches that CNs asked of an HN",
    "at_hns": "Batches at HNs",
    "at_workers": "Requests at workers",
    "audit_checked_total": "Batches of prepared programs that torch computed again",
    "audit_drifted_total": "Audited batches that differed from torch's",
    "batches_total": "Batches computed",
    "busy_seconds_total": "Seconds of computing",
    "cache_evicted_total": "Rows that left HNs' caches",
    "cache_hits_total": "Ids whose rows HNs had",
    "cache_ids_total": "Ids looked up in HNs' caches",
    "cache_rows_sent_total": "Rows sent to HNs",
    "cache_saved_bytes": "Bytes that the caches kept off the wire; below 0: they cost more",
    "cns": "CNs connected to an HN",
    "crossed_bytes_total": "Bytes between the halves",
    "hns": "HNs connected to a CN",
    "ids_total": "Ids that a shard looked up",
    "late_answers_total": "Answers of HNs that nobody waited for any more",
    "lost_batches_total": "Batches lost with an HN",
    "lost_lookups_total": "Lookups lost with a shard",
    "lost_total": "Requests lost with a worker",
    "other_versions_total": "Lookups that asked a shard for another version",
    "queued_seconds_total": "Seconds that requests waited",
    "refused_total": "Requests refused",
    "requests_total": "Requests taken",
    "rows_total": "Rows computed",
    "sent_total": "Requests sent to workers",
    "shards": "Shards connected to a CN",
    "stay_seconds_total": "Seconds that batches spent at an HN",
    "twin_lookups_total": "Lookups asked of a shard's twin, as one was silent",
    "waiting": "Requests in the queue",
    "window": "Batches that may be at HNs at once",
    "workers": "Workers connected to an ingress",
}


def rank_families(
    prefix: str, counted: Mapping[str, Mapping[str, float]], labels: Mapping[str, str] | None = None
) -> list[Metric]:
    """Return a metric for each thing that is counted, by model and name. `labels`: those of all series."""
    more = dict(labels or {})
    return [
        family(
            f"{prefix}_{name}",
            _SAID.get(name, f"{name} of a ranking model"),
            {(model, *more.values()): counts[name] for model, counts in counted.items() if name in counts},
            "model",
            *more,
        )
        for name in sorted({name for counts in counted.values() for name in counts})
    ]
