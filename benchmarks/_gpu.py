"""Shared by the benchmarks of a GPU: times by events and inside CUDA graphs, the copy bandwidth of the limits."""

from __future__ import annotations

from collections.abc import Callable

import torch


def time_events(call: Callable[[], None], repeats: int) -> float:
    """Median microseconds of one call."""
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return sorted(times)[len(times) // 2]


def time_graph(call: Callable[[int], None], copies: int) -> float:
    """Microseconds per call inside a CUDA graph of at least 40 calls that rotates over ``copies`` weight sets."""
    count = copies * max(1, -(-40 // copies))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            call(i % copies)
    graph.replay()
    return time_events(graph.replay, 7) / count


def measure_copy() -> float:
    """Bytes per second of a device-to-device copy of 2 GiB, read and written bytes counted."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / time_events(lambda: target.copy_(source), 12) * 1e6
