"""Which freshly computed keys and values enter the cache."""

from adaptivespec_vllm.kv.commit import CommitPlan, commit_slots, plan_commit, rows_in_sequence

__all__ = ["CommitPlan", "commit_slots", "plan_commit", "rows_in_sequence"]
