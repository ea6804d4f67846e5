"""Which fresh rows of keys and values are committed to which slots of the cache."""

from adaptivespec_vllm.kv.commit import CommitPlan, plan_commit

__all__ = ["CommitPlan", "plan_commit"]
