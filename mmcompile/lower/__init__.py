"""Lowering: a graph becomes a LaunchPlan; buffers, kernel choice, memory, dependencies."""
